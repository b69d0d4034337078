"""Metrics of one optimizer step, independent of its split over microbatches and ranks.

In the metrics of the mismatch between trainer and engine, r is the trainer's probability of a sampled token (before
the first step), divided by the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from ..algorithms.parts.policy_loss import LIMIT, exp_difference

SMALLEST = 1e-6
"""Log-ratios with a smaller absolute value share one bin."""
BINS_PER_SIDE = 512
"""Number of bins on each side of 0, evenly spaced on a log scale: neighboring edges differ by 3.3%."""
PERCENTILES = {"p1": 0.01, "p50": 0.5, "p99": 0.99}
POLICY_METRICS = ("loss", "grad_norm", "lr", "skipped", "step", "graphs")
CRITIC_METRICS = ("value_loss", "explained_variance", "critic_grad_norm", "critic_lr", "critic_skipped")
RESERVED_PREFIXES = ("logprob_diff", "mismatch_")


def is_reserved(name: str) -> bool:
    """Return True for the name of one of the trainer's own ``train/<name>`` metrics.

    A metric of an algorithm would replace it or be replaced by it.
    """
    return name in (*POLICY_METRICS, *CRITIC_METRICS) or name.startswith(RESERVED_PREFIXES)


def mismatch_values(difference: Tensor) -> dict[str, Tensor]:
    """Return the k3 estimate of KL(engine || trainer), r and r^2 of each token, [T] each, from log r [T]."""
    ratio = exp_difference(difference)
    return {"mismatch_kl": ratio - 1 - difference, "mismatch_ratio": ratio, "mismatch_ratio_squared": ratio * ratio}


def log_ratio_counts(difference: Tensor) -> Tensor:
    """Return the number of tokens per bin of log r: float64 [2 * BINS_PER_SIDE + 1]."""
    edges = _edges(difference.device)
    index = torch.bucketize(difference.double(), edges)
    return torch.zeros(len(edges) + 1, dtype=torch.float64, device=difference.device).index_add_(
        0, index, torch.ones_like(difference, dtype=torch.float64)
    )


def mismatch_summary(means: Mapping[str, float], counts: Tensor) -> dict[str, float]:
    """Return the mismatch metrics of a step.

    ``ess`` = E[r]^2 / E[r^2] (effective sample size as a fraction of the tokens), ``chi2`` = E[r^2] - 1 (chi-square
    divergence of trainer from engine), and percentiles of r, exact to one bin. All 0 without tokens.
    """
    names = ["mismatch_ess", "mismatch_chi2", *(f"mismatch_ratio_{name}" for name in PERCENTILES)]
    total = float(counts.sum())
    if total == 0:
        return dict.fromkeys(names, 0.0)
    first, second = means["mismatch_ratio"], means["mismatch_ratio_squared"]
    reached = counts.cumsum(0)
    middles = _middles()
    ratios = [float(middles[int((reached < q * total).sum())].exp()) for q in PERCENTILES.values()]
    return dict(zip(names, [first * first / second, second - 1, *ratios], strict=True))


@cache
def _edges(device: torch.device) -> Tensor:
    side = torch.logspace(
        torch.log10(torch.tensor(SMALLEST)).item(),
        torch.log10(torch.tensor(LIMIT)).item(),
        BINS_PER_SIDE,
        dtype=torch.float64,
    )
    return torch.cat([-side.flip(0), side]).to(device)


def _middles() -> Tensor:
    """Return a representative log-ratio of each bin: 0 for the middle one, else the geometric mean of its edges."""
    edges = _edges(torch.device("cpu"))
    side = (edges[BINS_PER_SIDE:-1] * edges[BINS_PER_SIDE + 1 :]).sqrt()
    side = torch.cat([side, edges[-1:]])
    return torch.cat([-side.flip(0), edges.new_zeros(1), side])


AllReduce = Callable[[Tensor], Tensor]
"""Sum of a tensor over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchLoss:
    """One microbatch's part of the step's loss, and the inputs of `StepMetrics.add`."""

    loss: Tensor
    """Scalar, to be summed over microbatches and ranks."""
    values: Mapping[str, Tensor]
    """[P] each: metrics that are averaged over tokens."""
    maxima: Mapping[str, Tensor]
    """[P] each: metrics of which the maximum is reported."""
    num_tokens: int
    mismatch: Tensor | None = None
    """`log_ratio_counts` of trainer and rollout engine, if there is an engine."""


@dataclass(slots=True, kw_only=True, eq=False)
class StepMetrics:
    """Sums and maxima over loss tokens, and the loss; on the device until `reduce`."""

    loss: Tensor | None = None
    """This rank's part of the step's loss."""
    num_tokens: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums by metric; `reduce` divides them by the number of loss tokens."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Maxima by metric, of nonnegative values."""
    mismatch: Tensor | None = None
    """Histogram of `log_ratio_counts`, if there is an engine."""

    def add(self, part: MicrobatchLoss) -> None:
        """Add one microbatch."""
        loss = part.loss.detach().double()
        self.loss = loss if self.loss is None else self.loss + loss
        self.num_tokens += part.num_tokens
        if part.mismatch is not None:
            self.mismatch = part.mismatch if self.mismatch is None else self.mismatch + part.mismatch
        for name, value in part.values.items():
            total = value.detach().double().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, value in part.maxima.items():
            largest = value.detach().double().amax() if value.numel() else value.new_zeros((), dtype=torch.float64)
            self.maxima[name] = torch.maximum(self.maxima[name], largest) if name in self.maxima else largest

    def reduce(self, all_reduce: AllReduce, *, rank: int, num_ranks: int) -> dict[str, float]:
        """Return ``train/<name>`` over all ranks, with one all-reduce; all ranks must have added as many microbatches.

        ``train/loss`` is the step's loss; maxima are named ``<name>_max``.
        """
        if self.loss is None:
            raise ValueError("reduce() needs at least one microbatch")
        sums, maxima = sorted(self.sums), sorted(self.maxima)
        head = torch.stack([self.loss, self.loss.new_tensor(float(self.num_tokens)), *(self.sums[n] for n in sums)])
        own = torch.stack([self.maxima[n] for n in maxima]) if maxima else head.new_zeros(0)
        slots = head.new_zeros(num_ranks, len(maxima))  # each rank fills its row: the sum has all ranks' maxima
        slots[rank] = own
        counts = head.new_zeros(0) if self.mismatch is None else self.mismatch
        reduced = all_reduce(torch.cat([head, slots.flatten(), counts])).cpu()
        loss, num_tokens, *totals = reduced[: len(head)].tolist()
        largest = reduced[len(head) : len(head) + slots.numel()].reshape(num_ranks, len(maxima))
        means = {n: total / max(num_tokens, 1.0) for n, total in zip(sums, totals, strict=True)}
        result = {"loss": loss, **means}
        if maxima:
            result |= {f"{n}_max": v for n, v in zip(maxima, largest.amax(0).tolist(), strict=True)}
        if self.mismatch is not None:
            result |= mismatch_summary(means, reduced[len(head) + slots.numel() :])
            del result["mismatch_ratio_squared"]
        return {f"train/{name}": value for name, value in result.items()}
