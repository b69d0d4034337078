"""How far the trainer's policy is from what drew the tokens, as numbers that add up over microbatches and ranks.

With r the ratio of the trainer's probability of a drawn token (before the first step) to the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from ..algorithms.parts.policy_loss import LIMIT, exp_difference

SMALLEST = 1e-6
"""Log-ratios that are nearer to 0 than this share one bin."""
BINS_PER_SIDE = 512
"""Bins of the log-ratio on each side of 0, evenly spaced on a log scale: neighbours differ by 3.3%."""
PERCENTILES = {"p1": 0.01, "p50": 0.5, "p99": 0.99}


def mismatch_values(difference: Tensor) -> dict[str, Tensor]:
    """[T] each, from log r [T]: k3 estimate of KL(engine || trainer), r and r^2."""
    ratio = exp_difference(difference)
    return {"mismatch_kl": ratio - 1 - difference, "mismatch_ratio": ratio, "mismatch_ratio_squared": ratio * ratio}


def log_ratio_counts(difference: Tensor) -> Tensor:
    """[2 * BINS_PER_SIDE + 1] float64: how many tokens' log r fall into each bin."""
    edges = _edges(difference.device)
    index = torch.bucketize(difference.double(), edges)
    return torch.zeros(len(edges) + 1, dtype=torch.float64, device=difference.device).index_add_(
        0, index, torch.ones_like(difference, dtype=torch.float64)
    )


def mismatch_summary(means: Mapping[str, float], counts: Tensor) -> dict[str, float]:
    """What is reported of a step: ``ess`` = E[r]^2 / E[r^2] (effective sample size as a fraction of the tokens),
    ``chi2`` = E[r^2] - 1 (chi-square divergence of trainer from engine), and percentiles of r.

    All 0 if there was no token. Percentiles are exact to one bin of the log-ratio.
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
    """Log-ratio that stands for each bin: 0 for the one in the middle, the geometric mean of its edges for others."""
    edges = _edges(torch.device("cpu"))
    side = (edges[BINS_PER_SIDE:-1] * edges[BINS_PER_SIDE + 1 :]).sqrt()
    side = torch.cat([side, edges[-1:]])
    return torch.cat([-side.flip(0), edges.new_zeros(1), side])
