"""Replacements of modules that Megatron-Core implements differently without TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn
from torch.nn.functional import linear

LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed queries, keys and values in transformers, regardless of ``rms_norm_eps``."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in fp32, times a weight (Zhang & Sennrich 2019); takes Megatron's arguments.

    With ``layernorm_zero_centered_gamma``, times 1 + weight in fp32, as in Gemma. Megatron's own without
    TransformerEngine does not support sequence parallelism.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        """Create the weight. ``unused`` are options of Megatron's fused norms, which have no effect."""
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


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """DeepSeek's attention (MLA), whose down-projection of keys and values is replicated on tensor-parallel ranks.

    Without TransformerEngine, Megatron-Core splits it, gathers its outputs, and then drops the contribution of other
    ranks' heads to the gradient of the keys' rotary part.
    """

    def __init__(self, config: Any, submodules: Any, **options: Any) -> None:
        super().__init__(config, submodules, **options)
        self.linear_kv_down_proj = _DownProjection(config)
        for norm in (getattr(self, name, None) for name in ("q_layernorm", "kv_layernorm")):
            if isinstance(norm, RMSNorm):
                norm.eps = LATENT_EPS


class _DownProjection(nn.Module):
    """Projection of hidden states [t, 1, H] to [t, 1, rank + r]: a compressed part and a rotary part of size r.

    Each tensor-parallel rank has different tokens (``sequence_parallel``). Megatron gathers the rotary part afterwards,
    so its gradient is summed over all ranks' heads.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        assert config.sequence_parallel or config.tensor_model_parallel_size == 1, (
            "models with experts require sequence_parallel"
        )
        shape = (config.kv_lora_rank + config.qk_pos_emb_head_dim, config.hidden_size)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the product, and None as the bias."""
        return linear(hidden, self.weight), None


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Linear layer with a normalized output, as GLM-4 has after attention and MLP."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.norm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)
        self.register_forward_hook(_normalize)  # runs after the hook of an adapter


def _normalize(layer: Any, inputs: Any, outputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return the normalized product, and the bias that is still to be added."""
    out, bias = outputs
    return layer.norm(out), bias
