"""Fused loss and gradient of log-probabilities, chunk by chunk: three matrix products instead of four.

P positions, H hidden size, V vocabulary size, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head_options import HeadOptions, HeadSettings, Targets, UpstreamGradients
from .kept_tokens import KeptTokens
from .linear_head import HeadGradients, LinearHead
from .logprobs import TokenScores

ChunkLoss = Callable[[TokenScores, slice | Tensor], Tensor]
"""Scalar loss of a chunk from its scores [C] and its slice or indices of the P positions. It must be additive over
chunks: the loss of a position may depend only on its own scores and on constants. Only the scores receive gradients."""


class LossAndScores(NamedTuple):
    """Loss and scores of all positions."""

    loss: Tensor
    """Scalar sum over chunks; differentiable once."""
    scores: TokenScores
    """[P] without gradient."""


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    loss: ChunkLoss,
    *,
    bias: Tensor | None = None,
    kept: KeptTokens | None = None,
    top_ids: Tensor | None = None,
    **settings: Unpack[HeadSettings],
) -> LossAndScores:
    """Sum ``loss`` over chunks of `token_logprobs`, with gradients for hidden, weight and bias.

    The gradient of a chunk's logits is computed right after its log-probabilities, so the logits are computed once, and
    the backward pass only scales the finished gradients. Suitable for per-token losses: policy gradients with given old
    log-probabilities, supervised fine-tuning, a KL or an entropy bonus in the loss. The arguments are those of
    `token_logprobs`; with a ``shard`` the loss must be the same on all ranks of its group.
    """
    options = HeadOptions.of(weight, **settings)
    aims = Targets(ids=targets, temperatures=temperatures, kept=kept, top_ids=top_ids)
    total, logprobs, entropy, top = _LinearTokenLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, aims, loss, options, torch.is_grad_enabled()
    )
    return LossAndScores(total, TokenScores(logprobs, entropy if options.with_entropy else None, top))


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        loss: ChunkLoss,
        options: HeadOptions,
        grad_enabled: bool,
    ) -> tuple[Tensor | None, ...]:
        head = LinearHead(hidden, weight, bias, options.invariant)
        gradients = HeadGradients(head, ctx.needs_input_grad[:3])
        losses, parts = [], []
        for chunk in head.chunks(options.chunk_size):
            logits, aims = head.logits(chunk), targets.of(chunk)
            stats = options.combine(options.stats(logits, aims), None if aims.kept is None else aims.kept.restricted)
            scores = TokenScores(stats.logprobs(), stats.full.entropy, stats.top_logprobs())
            value, up = _loss_gradient(loss, scores, chunk, options.entropy_grad)
            if grad_enabled and any(ctx.needs_input_grad):
                gradients.add(chunk, options.gradient(logits, aims, stats, up))
            losses.append(value)
            parts.append(scores[:3])
        head.release()
        gradients.sum_hidden(options.shard)
        ctx.gradients = gradients
        outputs = [None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)]
        ctx.mark_non_differentiable(*(output for output in outputs if output is not None))
        return torch.stack(losses).sum(), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return *ctx.gradients.finish(grad_loss), None, None, None, None


class _LossGradient(NamedTuple):
    value: Tensor
    up: UpstreamGradients


def _loss_gradient(loss: ChunkLoss, scores: TokenScores, chunk: slice, entropy_grad: bool) -> _LossGradient:
    """Return the loss of a chunk and its gradients for log-probabilities and, with ``entropy_grad``, entropies."""
    with torch.enable_grad():
        logprobs = scores.logprobs.detach().requires_grad_()
        entropy = None if scores.entropy is None else scores.entropy.detach().requires_grad_(entropy_grad)
        top = None if scores.top_logprobs is None else scores.top_logprobs.detach().requires_grad_()
        value = loss(TokenScores(logprobs, entropy, top), chunk)
        if value.ndim:
            raise ValueError(f"the loss of a chunk must be a scalar, got shape {tuple(value.shape)}")
        wanted = [part for part in (logprobs, entropy, top) if part is not None and part.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        if value.requires_grad:
            grads = torch.autograd.grad(value, wanted, allow_unused=True)
    up_logprobs, *others = grads
    up_top = None if top is None else others[-1]
    up = UpstreamGradients(
        torch.zeros_like(logprobs) if up_logprobs is None else up_logprobs, others[0] if entropy_grad else None, up_top
    )
    return _LossGradient(value.detach(), up)
