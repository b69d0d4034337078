"""What log-probabilities and their gradient need of each row of logits, and which kernels compute it.

C positions of one chunk, V tokens of (one rank's part of) the vocabulary. All results are fp32 (fp64 for fp64 logits).
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
"""Logits that exist in fp32 at one time: 64 MiB a copy, and a gradient needs two."""


class RowStats(NamedTuple):
    """Of scaled logits z = logits / temperature."""

    norms: Tensor
    """[C] log of the sum of exp(z)."""
    chosen: Tensor
    """[C] z at the target; 0 where the target is in another rank's part of the vocabulary."""
    means: Tensor | None
    """[C] mean of z under the softmax."""


class RowGradients(NamedTuple):
    """What the gradient of a row of logits is made of; ``norms`` and ``means`` are those of the whole vocabulary."""

    norms: Tensor
    logprobs: Tensor
    """[C] upstream gradient of the log-probabilities."""
    means: Tensor | None = None
    entropy: Tensor | None = None
    """[C] upstream gradient of the entropies; needs ``means``."""

    def of(self, chunk: slice) -> RowGradients:
        """Those of some rows."""
        norms, logprobs, means, entropy = (None if part is None else part[chunk] for part in self)
        assert norms is not None and logprobs is not None
        return RowGradients(norms, logprobs, means, entropy)


class StatsKernel(Protocol):
    """Leaves the logits [C, V] as they are; ``first`` is the id of their first token."""

    def __call__(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, *, first: int, with_means: bool
    ) -> RowStats: ...


class GradientKernel(Protocol):
    """Overwrites the logits [C, V] with the gradient of the logits, rounded to their dtype, and returns it.

    dlogp/dz = 1_target - p and dH/dz = p (E[z] - z), for p = softmax(z).
    """

    def __call__(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, upstream: RowGradients, *, first: int
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxKernels:
    """One way to compute both."""

    stats: StatsKernel
    gradient: GradientKernel


def kernels_for(weight: Tensor) -> SoftmaxKernels:
    """Triton's on a GPU, where there is Triton; else plain PyTorch."""
    if weight.is_cuda and weight.dtype != torch.float64 and len(weight) and _has_triton():
        from .softmax_triton import TRITON

        return TRITON
    return EAGER


def scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits in fp32 or better, divided by the temperature of their row."""
    high = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(high) / temperatures[:, None].to(high)


def eager_stats(logits: Tensor, targets: Tensor, temperatures: Tensor, *, first: int, with_means: bool) -> RowStats:
    high = torch.promote_types(logits.dtype, torch.float32)
    norms = logits.new_empty(len(logits), dtype=high)
    chosen = torch.zeros_like(norms)
    means = torch.empty_like(norms) if with_means else None
    for rows in _blocks(logits):
        z = scaled(logits[rows], temperatures[rows])
        norm = norms[rows] = z.logsumexp(-1)
        here, place = _places(targets[rows], first, z.shape[1])
        chosen[rows][here] = z[here, place]
        if means is not None:
            probs = (z - norm[:, None]).exp_()
            means[rows] = torch.linalg.vecdot(probs, z.clamp_(min=torch.finfo(high).min))  # 0 * -inf would be NaN
    return RowStats(norms, chosen, means)


def eager_gradient(
    logits: Tensor, targets: Tensor, temperatures: Tensor, upstream: RowGradients, *, first: int
) -> Tensor:
    for rows in _blocks(logits):
        z = scaled(logits[rows], temperatures[rows])
        over = temperatures[rows].to(z.dtype)
        up = upstream.logprobs[rows] / over
        if upstream.entropy is not None and upstream.means is not None:
            probs = (z - upstream.norms[rows, None]).exp_()
            slope = (upstream.entropy[rows] / over)[:, None]
            z = z.clamp_(min=torch.finfo(z.dtype).min).sub_(upstream.means[rows, None])
            grad = probs.mul_(z.mul_(-slope).sub_(up[:, None]))
        else:
            grad = z.sub_(upstream.norms[rows, None]).exp_().mul_(-up[:, None])
        here, place = _places(targets[rows], first, z.shape[1])
        grad[here, place] += up[here]
        logits[rows] = grad
    return logits


EAGER = SoftmaxKernels(stats=eager_stats, gradient=eager_gradient)


def _places(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows whose target is among the tokens first..first+width-1, and where it is there."""
    here = ((targets >= first) & (targets < first + width)).nonzero()[:, 0]
    return here, targets[here] - first


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS // max(1, logits.shape[1]))
    return (slice(start, start + size) for start in range(0, len(logits), size))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
