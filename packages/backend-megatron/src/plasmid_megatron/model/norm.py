"""RMSNorm as in Hugging Face models. Megatron's own without TransformerEngine does not support sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in fp32, times a weight (Zhang & Sennrich 2019); takes Megatron's arguments.

    With ``layernorm_zero_centered_gamma``, times 1 + weight in fp32, as in Gemma.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        """Ignores options of Megatron's fused norms."""
        super().__init__()
        # with CPU initialization use torch's default device, which is meta for outlines of models
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Megatron sums gradients of marked weights over tensor-parallel ranks, which have different tokens
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps
        self._is_centered = bool(config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor in the dtype of ``x``."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self._is_centered:
            return (scaled * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * scaled.to(x.dtype)
