"""Softmax statistics and gradients of rows of logits, with eager kernels and the choice of kernels.

C positions of one chunk, V tokens of (one rank's shard of) the vocabulary. All results are fp32 (fp64 for fp64 logits).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**24
"""Maximum number of logits converted to fp32 at once: 64 MiB per copy, and a gradient needs two."""


class RowStats(NamedTuple):
    """Statistics of scaled logits z = logits / temperature."""

    tops: Tensor
    """[C] largest z."""
    sums: Tensor
    """[C] sum of exp(z - top)."""
    chosen: Tensor
    """[C] z at the target; 0 if the target is in another rank's shard."""
    entropy: Tensor | None
    """[C] entropy of the softmax, in nats."""

    def logprobs(self) -> Tensor:
        """Return [C] log-probabilities of the targets."""
        return (self.chosen - self.tops) - self.sums.log()


class RowGradients(NamedTuple):
    """Inputs of the gradient of a row of logits; [C] each."""

    tops: Tensor
    """As in `RowStats`, over the whole vocabulary; log p is (z - top) - log, which rounds less than z - (top + log)."""
    logs: Tensor
    """Logarithms of `RowStats.sums`."""
    up_logprobs: Tensor
    """Upstream gradient of the log-probabilities."""
    entropy: Tensor | None = None
    """Entropies over the whole vocabulary; required with ``up_entropy``."""
    up_entropy: Tensor | None = None
    """Upstream gradient of the entropies."""


class StatsKernel(Protocol):
    """Computes `RowStats` of the logits [C, V], without modifying them; ``first`` is the id of their first token."""

    def __call__(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, *, first: int, with_entropy: bool
    ) -> RowStats: ...


class GradientKernel(Protocol):
    """Overwrites the logits [C, V] with the gradient of the logits, rounded to their dtype, and returns it.

    dlogp/dz = 1_target - p and dH/dz = -p (log p + H), for p = softmax(z).
    """

    def __call__(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, upstream: RowGradients, *, first: int
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxKernels:
    """A pair of kernels."""

    stats: StatsKernel
    gradient: GradientKernel


def kernels_for(weight: Tensor) -> SoftmaxKernels:
    """Return the Triton kernels on a GPU if Triton is installed, else the eager ones."""
    if weight.is_cuda and weight.dtype != torch.float64 and len(weight) and _has_triton():
        from .softmax_triton import TRITON

        return TRITON
    return EAGER


def scale_logits(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return the logits in at least fp32, divided by their row's temperature."""
    high = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(high) / temperatures[:, None].to(high)


def eager_stats(logits: Tensor, targets: Tensor, temperatures: Tensor, *, first: int, with_entropy: bool) -> RowStats:
    high = torch.promote_types(logits.dtype, torch.float32)
    tops = logits.new_empty(len(logits), dtype=high)
    sums, chosen = torch.empty_like(tops), torch.zeros_like(tops)
    entropy = torch.empty_like(tops) if with_entropy else None
    for rows in _blocks(logits):
        z = scale_logits(logits[rows], temperatures[rows])
        here, place = _places(targets[rows], first, z.shape[1])
        chosen[rows][here] = z[here, place]
        lowest = torch.finfo(high).min  # not -inf, even if every logit is: -inf + inf would be NaN
        top = tops[rows] = z.amax(-1).clamp_(min=lowest) if z.shape[1] else z.new_full((len(z),), lowest)
        z.sub_(top[:, None])
        probs = z.exp()
        total = sums[rows] = probs.sum(-1)
        if entropy is not None:
            entropy[rows] = total.log() - torch.linalg.vecdot(probs, _clamp_finite(z)) / total
    return RowStats(tops, sums, chosen, entropy)


def eager_gradient(
    logits: Tensor, targets: Tensor, temperatures: Tensor, upstream: RowGradients, *, first: int
) -> Tensor:
    for rows in _blocks(logits):
        logprobs = scale_logits(logits[rows], temperatures[rows])
        logprobs.sub_(upstream.tops[rows, None]).sub_(upstream.logs[rows, None])
        over = temperatures[rows].to(logprobs.dtype)
        up = upstream.up_logprobs[rows] / over
        if upstream.entropy is not None and upstream.up_entropy is not None:
            probs = logprobs.exp()
            slope = (upstream.up_entropy[rows] / over)[:, None]
            # this order of operations cannot overflow
            grad = _clamp_finite(logprobs).add_(upstream.entropy[rows, None]).mul_(probs).mul_(-slope)
            grad.sub_(probs.mul_(up[:, None]))
        else:
            grad = logprobs.exp_().mul_(-up[:, None])
        here, place = _places(targets[rows], first, grad.shape[1])
        grad[here, place] += up[here]
        logits[rows] = grad
    return logits


EAGER = SoftmaxKernels(stats=eager_stats, gradient=eager_gradient)


def _clamp_finite(logprobs: Tensor) -> Tensor:
    """Clamp in place to finite values, because 0 * -inf would be NaN."""
    return logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)


def _places(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the rows whose target is among the tokens first..first+width-1, and its column."""
    here = ((targets >= first) & (targets < first + width)).nonzero()[:, 0]
    return here, targets[here] - first


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS // max(1, logits.shape[1]))
    return (slice(start, start + size) for start in range(0, len(logits), size))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
