"""A platform that computes with plain torch on the CPU and needs none of SGLang's compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PlainCpu(CpuDeviceMixin, SRTPlatform):
    """SGLang's own "cpu" needs kernels that are on no package index; third-party platforms need none."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def init_backend(self) -> None:
        """Use plain tensors as host buffers: SGLang's own "cpu" registers their memory with CUDA."""
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        ALLOC_MEMORY_FUNCS["cpu"] = allocate

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False


def allocate(dims: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)
