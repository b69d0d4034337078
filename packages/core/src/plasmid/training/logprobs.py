"""Log-probabilities of given tokens from hidden states. The logits of only one chunk of positions exist at a time.

P positions, H hidden size, V vocabulary size. Logits are computed in the weight's dtype, the softmax in fp32 (fp64 for
fp64 weights).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class TokenScores(NamedTuple):
    """Per predicted token."""

    logprobs: Tensor
    """[P] log-softmax of logits / temperature at the target."""
    entropy: Tensor | None
    """[P] of the whole distribution, in nats."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    with_entropy: bool = True,
    entropy_grad: bool = False,
    chunk_size: int = 1024,
) -> TokenScores:
    """Score targets [P] under the linear head ``weight`` [V, H] applied to ``hidden`` [P, H]; differentiable once.

    Logits are computed ``chunk_size`` positions at a time and again for the gradient (but for the last chunk, whose
    logits are kept), so memory is O(chunk_size * V). Without ``entropy_grad`` the entropy carries no gradient. With P
    of 0 the results are empty and still have the head and the hidden states in their graph.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperatures, with_entropy or entropy_grad, entropy_grad, chunk_size
    )
    return TokenScores(logprobs, entropy if with_entropy else None)


def logits_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = False,
) -> TokenScores:
    """The same from logits [P, V], for models whose head is more than a linear layer (soft-capped logits, say)."""
    scaled = _scaled(logits, temperatures)
    logprobs = scaled.log_softmax(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    if not with_entropy:
        return TokenScores(chosen, None)
    source = logprobs if entropy_grad else logprobs.detach()
    finite = source.clamp(min=torch.finfo(source.dtype).min)  # where a logit is -inf, 0 * -inf would be NaN
    return TokenScores(chosen, -(source.exp() * finite).sum(-1))


class _LinearLogprobs(torch.autograd.Function):
    """dlogp/dz = 1_target - p and dH/dz = p (E[z] - z) for the scaled logits z = logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        with_entropy: bool,
        entropy_grad: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor | None]:
        high = torch.promote_types(weight.dtype, torch.float32)
        logprobs = hidden.new_empty(len(targets), dtype=high)
        norms = torch.empty_like(logprobs)
        means = torch.empty_like(logprobs) if with_entropy else None
        raw = None
        for chunk in _chunks(len(targets), chunk_size):
            raw = None  # free the last chunk's logits first
            raw = linear(hidden[chunk], weight, bias)
            scaled = _scaled(raw, temperatures[chunk])
            norms[chunk] = scaled.logsumexp(-1)
            logprobs[chunk] = scaled.gather(-1, targets[chunk, None])[:, 0] - norms[chunk]
            if means is not None:
                means[chunk] = torch.linalg.vecdot((scaled - norms[chunk, None]).exp_(), scaled)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, norms, means, raw)
        ctx.chunk_size, ctx.entropy_grad = chunk_size, entropy_grad
        entropy = None if means is None else norms - means
        if entropy is not None and not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, norms, means, kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_logprobs, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # fp32 sums: a bf16 weight's gradient would lose the later chunks to rounding
        grad_weight = torch.zeros_like(weight, dtype=norms.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=norms.dtype) if needs_bias else None
        for chunk in reversed(_chunks(len(targets), ctx.chunk_size)):
            raw = kept if kept is not None else linear(hidden[chunk], weight, bias)
            kept = None
            scaled = _scaled(raw, temperatures[chunk])
            over = temperatures[chunk].to(norms.dtype)
            up = norms.new_zeros(len(over)) if grad_logprobs is None else grad_logprobs[chunk] / over
            if ctx.entropy_grad and grad_entropy is not None:
                probs = (scaled - norms[chunk, None]).exp_()
                slope = (grad_entropy[chunk] / over)[:, None]
                d_logits = probs.mul_(scaled.sub_(means[chunk, None]).mul_(-slope).sub_(up[:, None]))
            else:
                d_logits = scaled.sub_(norms[chunk, None]).exp_().mul_(-up[:, None])
            d_logits.scatter_add_(1, targets[chunk, None], up[:, None])
            low = d_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = low @ weight
            if grad_weight is not None:
                grad_weight += low.T @ hidden[chunk]
            if grad_bias is not None:
                grad_bias += d_logits.sum(0)
        cast_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        cast_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, cast_weight, cast_bias, None, None, None, None, None


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits in fp32 or better, divided by the temperature of their row."""
    high = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(high) / temperatures[:, None].to(high)


def _chunks(length: int, size: int) -> list[slice]:
    """At least one chunk, also of nothing: gradients of the head must exist on every rank."""
    return [slice(start, min(start + size, length)) for start in range(0, max(length, 1), size)]
