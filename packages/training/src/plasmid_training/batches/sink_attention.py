"""Attention with sinks by torch's packed FlashAttention kernels, which have none. t tokens, h query heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class PackedSinkAttention(torch.autograd.Function):
    """Causal attention of packed samples with a learned logit per head in the denominator of the softmax.

    The kernel's output and log-sum-exp are corrected after the forward pass. With both corrected, the kernel's backward
    pass gives the exact gradients: it derives the probabilities from the log-sum-exp, and the value of a sink is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        cu_seqlens: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        scale: float,
        window: tuple[int, int],
    ) -> Tensor:
        """Return the output [t, h, e]. Takes the arguments of `varlen_attn`, and ``sinks`` [h]."""
        ctx.call = (*cu_seqlens, *longest, 0.0, window == (-1, 0))
        ctx.options = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        out, lse, *random, _ = aten._flash_attention_forward(query, key, value, *ctx.call, False, **ctx.options)
        whole = torch.logaddexp(lse, sinks.float()[:, None])  # [h, t]
        out = (out * (lse - whole).exp().T[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, whole, *random)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, whole, *random = ctx.saved_tensors
        grad = grads[0].contiguous()
        found = aten._flash_attention_backward(grad, query, key, value, out, whole, *ctx.call, *random, **ctx.options)
        share = (sinks.float()[:, None] - whole).exp()  # [h, t] probability of the sink
        of_sinks = -(share * (grad.float() * out.float()).sum(-1).T).sum(1)
        return *found, of_sinks.to(sinks.dtype), None, None, None, None
