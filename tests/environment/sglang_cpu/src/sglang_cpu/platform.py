"""A platform that computes with plain torch on the CPU and needs none of SGLang's compiled kernels."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PlainCpu(CpuDeviceMixin, SRTPlatform):
    """SGLang's own "cpu" wants kernels that are on no package index; a platform of others is asked for nothing."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
