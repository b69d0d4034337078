"""Attention of ``run.deterministic``: batch-invariant forward pass, deterministic backward pass. t tokens, h heads."""

from __future__ import annotations

from typing import Any

import torch
from plasmid_models.kernels.invariant import Spans, attention
from plasmid_models.kernels.invariant_modules import call_without_checks, check_attention
from plasmid_training.batches.packed_attention import attend
from torch import Tensor, nn
from transformers import AttentionInterface

INVARIANT = "plasmid_invariant"
"""Name of this attention in transformers' registry of attention functions."""


class _Attention(torch.autograd.Function):
    """Attention with a batch-invariant forward pass. The backward pass recomputes it with PyTorch's packed kernels."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, bounds: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, bounds)
        ctx.longest, ctx.scale = spans.longest, scale
        return attention(query, key.transpose(0, 1)[None], value.transpose(0, 1)[None], spans, scale=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, bounds = ctx.saved_tensors
        with torch.enable_grad():
            query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            out = attend(query, key, value, bounds, ctx.longest, scale=ctx.scale)
            return *torch.autograd.grad(out, leaves, grads[0]), None, None, None


def invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    spans: Spans,
    bounds: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: [1, t, h, e] from query [1, h, t, d], key and value of a packed row."""
    check_attention(sliding_window, s_aux)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = (x[0].transpose(0, 1) for x in (query, key, value))
    return call_without_checks(_Attention.apply, *packed, spans, bounds, scale)[None], None


AttentionInterface.register(INVARIANT, invariant_attention)
