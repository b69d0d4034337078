"""Custom weight loader that runs inside SGLang's processes and executes the engine's commands."""

from __future__ import annotations

from collections.abc import Sequence

from plasmid_serving.weights.loading import Fusions, execute
from torch import Tensor, nn

from .launch import MESSAGE

FUSIONS = Fusions("SGLang", {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")})
"""Applies to 0.5.17 and 0.5.23: attention of DeepSeek-V2, V3 and similar models."""


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Execute one command. Never raises."""
    execute(model, bytes(dict(named_tensors)[MESSAGE].cpu().numpy()), FUSIONS)
