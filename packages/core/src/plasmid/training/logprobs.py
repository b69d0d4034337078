"""Log-probabilities of given tokens from hidden states. The logits of only one chunk of positions exist at a time.

P positions, H hidden size, V vocabulary size. Logits are computed in the weight's dtype, the softmax in fp32 (fp64 for
fp64 weights).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .linear_head import ChunkSize, HeadGradients, HeadOptions, LinearHead
from .softmax_rows import RowGradients, RowStats, SoftmaxKernels, scaled
from .vocab_shard import VocabShard


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
    chunk_size: ChunkSize = "auto",
    shard: VocabShard | None = None,
    kernels: SoftmaxKernels | None = None,
) -> TokenScores:
    """Score targets [P] under the linear head ``weight`` [V, H] applied to ``hidden`` [P, H]; differentiable once.

    Logits are computed ``chunk_size`` positions at a time and again for the gradient (but for the last chunk, whose
    logits are kept), so memory is O(chunk_size * V). Without ``entropy_grad`` the entropy carries no gradient. With P
    of 0 the results are empty and still have the head and the hidden states in their graph. With a ``shard`` weight
    and bias are this rank's rows, everything else is the same on all ranks of its group, the results and their
    gradients too; targets are ids of the whole vocabulary. ``kernels`` are by default the fastest there are.
    """
    options = HeadOptions.of(
        weight,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        chunk_size=chunk_size,
        shard=shard,
        kernels=kernels,
    )
    logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperatures, options
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
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor | None]:
        head = LinearHead(hidden, weight, bias)
        logits, parts = None, []
        for chunk in head.chunks(options.chunk_size):
            logits = head.logits(chunk)
            parts.append(options.stats(logits, targets[chunk], temperatures[chunk]))
        stats = _joined(parts)
        if options.shard is not None:
            stats = options.shard.combine(stats)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, stats.tops, stats.sums, stats.entropy)
        ctx.options = options
        # not a saved tensor: the first backward pass overwrites it, a second one computes it again
        ctx.last_logits = logits if any(ctx.needs_input_grad) else None
        if stats.entropy is not None and not options.entropy_grad:
            ctx.mark_non_differentiable(stats.entropy)
        return stats.logprobs(), stats.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, tops, sums, entropy = ctx.saved_tensors
        options: HeadOptions = ctx.options
        logits, ctx.last_logits = ctx.last_logits, None
        up_entropy = grads[1] if options.entropy_grad else None
        up_logprobs = torch.zeros_like(tops) if grads[0] is None else grads[0]
        upstream = RowGradients(tops, sums.log(), up_logprobs, entropy, up_entropy)
        head = LinearHead(hidden, weight, bias)
        total = HeadGradients(head, ctx.needs_input_grad[:3])
        for chunk in reversed(head.chunks(options.chunk_size)):
            logits = head.logits(chunk) if logits is None else logits
            total.add(chunk, options.gradient(logits, targets[chunk], temperatures[chunk], upstream.of(chunk)))
            logits = None  # free the kept ones before there are new ones
        head.release()
        total.sum_hidden(options.shard)
        return *total.finish(), None, None, None


def _joined(parts: list[RowStats]) -> RowStats:
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return RowStats(
        torch.cat([part.tops for part in parts]),
        torch.cat([part.sums for part in parts]),
        torch.cat([part.chosen for part in parts]),
        torch.cat(entropies) if entropies else None,
    )
