"""Log-probabilities of given tokens from hidden states. The logits of only one chunk of positions exist at a time.

P positions, H hidden size, V vocabulary size. Logits are computed in the weight's dtype, the softmax in fp32 (fp64 for
fp64 weights).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head_options import HeadOptions, HeadSettings, HeadStats, Targets, Upstream
from .kept_tokens import KeptTokens
from .linear_head import HeadGradients, LinearHead
from .softmax_rows import RowStats, scaled


class TokenScores(NamedTuple):
    """Per predicted token."""

    logprobs: Tensor
    """[P] log-softmax of logits / temperature at the target, over its kept set where it has one."""
    entropy: Tensor | None
    """[P] of the whole distribution, in nats."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    kept: KeptTokens | None = None,
    **settings: Unpack[HeadSettings],
) -> TokenScores:
    """Score targets [P] under the linear head ``weight`` [V, H] applied to ``hidden`` [P, H]; differentiable once.

    Logits are computed ``chunk_size`` positions at a time and again for the gradient (but for the last chunk, whose
    logits are kept), so memory is O(chunk_size * V). Where ``kept`` has a set, the log-probability is that among its
    tokens; the entropy is always that of the whole vocabulary. Without ``entropy_grad`` it carries no gradient. With P
    of 0 the results are empty and still have the head and the hidden states in their graph. With a ``shard`` weight
    and bias are this rank's rows, everything else is the same on all ranks of its group, the results and their
    gradients too; targets are ids of the whole vocabulary.
    """
    options = HeadOptions.of(weight, **settings)
    logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, Targets(ids=targets, temperatures=temperatures, kept=kept), options
    )
    return TokenScores(logprobs, entropy if options.with_entropy else None)


def logits_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = False,
) -> TokenScores:
    """The same from logits [P, V], for models whose head is more than a linear layer (soft-capped logits, say)."""
    logprobs = scaled(logits, temperatures).log_softmax(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    if not with_entropy:
        return TokenScores(chosen, None)
    source = logprobs if entropy_grad else logprobs.detach()
    finite = source.clamp(min=torch.finfo(source.dtype).min)  # where a logit is -inf, 0 * -inf would be NaN
    return TokenScores(chosen, -(source.exp() * finite).sum(-1))


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: HeadOptions
    ) -> tuple[Tensor, Tensor | None]:
        head = LinearHead(hidden, weight, bias)
        logits, parts = None, []
        for chunk in head.chunks(options.chunk_size):
            logits = head.logits(chunk)
            parts.append(options.stats(logits, targets.of(chunk)))
        restricted = None if targets.kept is None else targets.kept.restricted()
        stats = options.combine(HeadStats.join(parts), restricted)
        ctx.save_for_backward(hidden, weight, bias, *stats.full, *(stats.drawn or ()))
        ctx.targets, ctx.options = targets, options
        # not a saved tensor: the first backward pass overwrites it, a second one computes it again
        ctx.last_logits = logits if any(ctx.needs_input_grad) else None
        if stats.full.entropy is not None and not options.entropy_grad:
            ctx.mark_non_differentiable(stats.full.entropy)
        return stats.logprobs(), stats.full.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *saved = ctx.saved_tensors
        stats = HeadStats(RowStats(*saved[:4]), RowStats(*saved[4:]) if saved[4:] else None)
        targets: Targets = ctx.targets
        options: HeadOptions = ctx.options
        logits, ctx.last_logits = ctx.last_logits, None
        up_logprobs = torch.zeros_like(stats.full.tops) if grads[0] is None else grads[0]
        up = Upstream(up_logprobs, grads[1] if options.entropy_grad else None)
        head = LinearHead(hidden, weight, bias)
        total = HeadGradients(head, ctx.needs_input_grad[:3])
        for chunk in reversed(head.chunks(options.chunk_size)):
            logits = head.logits(chunk) if logits is None else logits
            total.add(chunk, options.gradient(logits, targets.of(chunk), stats.of(chunk), up.of(chunk)))
            logits = None  # free those of the last chunk before there are new ones
        head.release()
        total.sum_hidden(options.shard)
        return *total.finish(), None, None
