"""Log-probabilities of given tokens from hidden states, with the logits of one chunk of positions at a time.

P positions, H hidden size, V vocabulary size. Logits are computed in the weight's dtype, the softmax in fp32 (fp64 for
fp64 weights).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from plasmid_models.kernels.softmax_rows import RowStats
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head_options import HeadOptions, HeadSettings, HeadStats, Targets, UpstreamGradients
from .kept_tokens import KeptTokens
from .linear_head import HeadGradients, LinearHead
from .top_tokens import TopStats


class TokenScores(NamedTuple):
    """Scores of P predicted tokens."""

    logprobs: Tensor
    """[P] log-softmax of logits / temperature at the target, over its kept set if it has one."""
    entropy: Tensor | None
    """[P] entropy of the whole distribution, in nats."""
    top_logprobs: Tensor | None = None
    """[P, K] log-softmax of logits / temperature at the given or chosen top tokens, over the whole vocabulary."""
    top_ids: Tensor | None = None
    """[P, K] int64: the chosen top tokens; None unless the head chose them."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    kept: KeptTokens | None = None,
    top_ids: Tensor | None = None,
    **settings: Unpack[HeadSettings],
) -> TokenScores:
    """Score targets [P] under the linear head ``weight`` [V, H] applied to ``hidden`` [P, H]; differentiable once.

    Logits are computed for ``chunk_size`` positions at a time and recomputed for the gradient (except the last chunk,
    whose logits are kept), so memory is O(chunk_size * V). If ``kept`` has a set for a position, its log-probability is
    normalized over that set; the entropy is always that of the whole vocabulary, and not differentiable without
    ``entropy_grad``. ``top_ids`` [P, K] are further tokens to score. With P = 0 the results are empty but still connect
    to the head and the hidden states in the graph. With a ``shard``, weight and bias are this rank's rows; all other
    inputs, the results and their gradients are the same on all ranks of its group, and targets are ids of the whole
    vocabulary.
    """
    options = HeadOptions.of(weight, **settings)
    aims = Targets(ids=targets, temperatures=temperatures, kept=kept, top_ids=top_ids)
    logprobs, entropy, *top = _LinearLogprobs.apply(hidden, weight, bias, aims, options)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, entropy if options.with_entropy else None, *top)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: HeadOptions
    ) -> tuple[Tensor | None, ...]:
        head = LinearHead(hidden, weight, bias, options.invariant)
        logits, parts = None, []
        for chunk in head.chunks(options.chunk_size):
            logits = head.logits(chunk)
            parts.append(options.stats(logits, targets.of(chunk)))
        restricted = None if targets.kept is None else targets.kept.restricted()
        stats = options.combine(HeadStats.join(parts), restricted)
        none = (None,) * 4
        ctx.save_for_backward(hidden, weight, bias, *stats.full, *(stats.drawn or none), *(stats.top or none[:2]))
        ctx.targets, ctx.options = targets, options
        # not a saved tensor: the first backward pass overwrites it, a second one recomputes it
        ctx.last_logits = logits if any(ctx.needs_input_grad) else None
        entropy, top, chosen = stats.full.entropy, stats.top_logprobs(), None
        constant = [] if entropy is None or options.entropy_grad else [entropy]
        if options.top is not None and stats.top is not None and top is not None:
            chosen = stats.top.ids
            constant += [top, chosen]
        ctx.mark_non_differentiable(*constant)
        return stats.logprobs(), entropy, top, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *saved = ctx.saved_tensors
        full, drawn, top = saved[:4], saved[4:8], saved[8:]
        stats = HeadStats(
            RowStats(*full),
            RowStats(*drawn) if drawn[0] is not None else None,
            TopStats(*top) if top[1] is not None else None,
        )
        targets: Targets = ctx.targets
        options: HeadOptions = ctx.options
        logits, ctx.last_logits = ctx.last_logits, None
        up_logprobs = torch.zeros_like(stats.full.tops) if grads[0] is None else grads[0]
        up_top = grads[2] if options.top is None else None
        up = UpstreamGradients(up_logprobs, grads[1] if options.entropy_grad else None, up_top)
        head = LinearHead(hidden, weight, bias, options.invariant)
        total = HeadGradients(head, ctx.needs_input_grad[:3])
        for chunk in reversed(head.chunks(options.chunk_size)):
            logits = head.logits(chunk) if logits is None else logits
            total.add(chunk, options.gradient(logits, targets.of(chunk), stats.of(chunk), up.of(chunk)))
            logits = None  # free those of the last chunk before computing new ones
        head.release()
        total.sum_hidden(options.shard)
        return *total.finish(), None, None
