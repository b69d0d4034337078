"""Sampling of the next token of every row, with its log-probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from plasmid.types import Floats, Ints, SamplingParams
from plasmid_models.kernels.softmax_rows import RowStats, kernels_for, scale_logits
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
CANDIDATES = 1024
UNITS = 2.0**52
"""Number of integer units that a cumulative sum is divided into."""
TINY = 2.0**-1000


class KeptTokens(NamedTuple):
    """The tokens that truncation left for one row."""

    token_ids: Ints
    """Empty if nothing was truncated."""
    log_mass: float
    """Log of their total probability before truncation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTokens:
    """One sampled token for each of n rows."""

    token_ids: Ints
    """[n]"""
    logprobs: Floats
    """[n] log-softmax of logits / temperature at the token, before any truncation; not finite if the logits are not."""
    kept: tuple[KeptTokens | None, ...]
    """n sets of tokens left after truncation, where requested."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Truncation:
    """Truncation settings of the rows that sample from part of the vocabulary. V is the vocabulary size."""

    rows: Tensor
    """[m] row indices."""
    top_k: Tensor
    """[m, 1]; V for no limit."""
    top_p: Tensor
    """[m, 1]"""
    min_p: Tensor
    """[m, 1]"""


class Sampler:
    """Sampling settings of n rows as tensors; reused as long as the same rows run."""

    def __init__(self, params: Sequence[SamplingParams], *, wants_kept: Sequence[bool], device: torch.device) -> None:
        self._device = device
        self._temperatures = self._column([p.scoring_temperature for p in params])[:, 0]
        self._zeros = torch.zeros(len(params), dtype=torch.long, device=device)
        greedy = [p.temperature == 0 for p in params]
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._wants_kept = tuple(wants_kept)
        self._params = tuple(params)

    def draw(self, logits: Tensor, uniforms: NDArray[np.float64]) -> SampledTokens:
        """Sample by inverting the cumulative distribution at the uniforms [n].

        Log-probabilities have the same bits as in a trainer's head with these logits [n, V].
        """
        stats = self._stats(logits)
        scaled = scale_logits(logits, self._temperatures)
        weights = (scaled - stats.tops[:, None]).exp_().div_(stats.sums[:, None])
        keep = self._keep(weights)
        if keep is not None:
            weights = weights.mul_(keep)
        points = torch.from_numpy(uniforms).to(self._device)
        token_ids = invert_cdf(weights.nan_to_num_(0.0), points)
        if self._greedy is not None:
            token_ids = torch.where(self._greedy, scaled.argmax(-1), token_ids)
        logprobs = stats._replace(chosen=self._stats(logits.gather(1, token_ids[:, None])).chosen).logprobs()
        return SampledTokens(
            token_ids=token_ids.to(torch.int32).cpu().numpy(),
            logprobs=logprobs.cpu().numpy(),
            kept=self._kept_sets(keep, weights, token_ids, logprobs),
        )

    def _stats(self, logits: Tensor) -> RowStats:
        """Return the statistics of rows of logits; `chosen` is that of their first column."""
        kernels = kernels_for(logits)
        return kernels.stats(logits, self._zeros, self._temperatures, first=0, with_entropy=False)

    def _keep(self, weights: Tensor) -> Tensor | None:
        truncation = self._truncation(weights.shape[1])
        if truncation is None:
            return None
        if len(truncation.rows) == len(weights):
            return compute_kept_mask(weights, truncation)
        keep = torch.ones_like(weights, dtype=torch.bool)
        keep[truncation.rows] = compute_kept_mask(weights[truncation.rows], truncation)
        return keep

    def _truncation(self, size: int) -> Truncation | None:
        rows = [i for i, p in enumerate(self._params) if p.temperature > 0 and _truncates(p, size)]
        if not rows:
            return None
        params = [self._params[i] for i in rows]
        return Truncation(
            rows=torch.tensor(rows, device=self._device),
            top_k=self._column([size if p.top_k == "all" else min(p.top_k, size) for p in params]),
            top_p=self._column([p.top_p for p in params]),
            min_p=self._column([p.min_p for p in params]),
        )

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]

    def _kept_sets(
        self, keep: Tensor | None, weights: Tensor, token_ids: Tensor, logprobs: Tensor
    ) -> tuple[KeptTokens | None, ...]:
        """Return the sets. ``weights`` [n, V] are probabilities before truncation, 0 for tokens that truncation
        removed."""
        if not any(self._wants_kept):
            return (None,) * len(self._params)
        log_mass = weights.sum(-1, dtype=torch.float64).log_().tolist()
        sets: list[KeptTokens | None] = [None] * len(self._params)
        for i in (i for i, wanted in enumerate(self._wants_kept) if wanted):
            if self._params[i].temperature == 0:
                sets[i] = KeptTokens(token_ids[i : i + 1].to(torch.int32).cpu().numpy(), float(logprobs[i]))
            elif keep is None or bool(keep[i].all()):
                sets[i] = KeptTokens(np.zeros(0, np.int32), 0.0)
            else:
                sets[i] = KeptTokens(keep[i].nonzero()[:, 0].to(torch.int32).cpu().numpy(), log_mass[i])
        return tuple(sets)


def _truncates(params: SamplingParams, size: int) -> bool:
    some = params.top_k != "all" and params.top_k < size
    return some or params.top_p < 1.0 or params.min_p > 0.0


def compute_kept_mask(probs: Tensor, truncation: Truncation) -> Tensor:
    """Return a mask [m, V]: True where top-k, then top-p of the rest, then min-p keep a token."""
    size = probs.shape[1]
    keep = torch.ones_like(probs, dtype=torch.bool)
    narrow = ((truncation.top_k < size) | (truncation.top_p < 1))[:, 0].nonzero()[:, 0]
    if len(narrow):
        keep[narrow] = _top_k_top_p(probs[narrow], truncation.top_k[narrow], truncation.top_p[narrow])
    return keep & (probs >= truncation.min_p * probs.amax(-1, keepdim=True))


def _top_k_top_p(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    values, order = _largest(probs, top_k, top_p)
    keep = torch.arange(values.shape[1], device=probs.device) < top_k
    values = values.double().mul_(keep)
    sums = values.cumsum(-1)
    total = torch.where(top_k < probs.shape[1], sums[:, -1:], probs.sum(-1, keepdim=True, dtype=torch.float64))
    keep &= (sums - values < top_p.double() * total) | (top_p >= 1)
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, keep)


def _largest(probs: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return enough of the largest probabilities, in order, to decide; sorting the whole vocabulary is slow."""
    size = probs.shape[1]
    if size > CANDIDATES:
        values, order = probs.topk(CANDIDATES)
        enough = values.sum(-1, keepdim=True) > top_p + 1e-5
        if bool(torch.where(top_k < size, top_k <= CANDIDATES, enough).all()):
            return values, order
    sorted_ = torch.sort(probs, dim=-1, descending=True, stable=True)
    return sorted_.values, sorted_.indices


def invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return indices [n] where the cumulative sums of ``weights`` [n, V] first exceed ``uniforms`` [n] of their total.

    Weights need not sum to 1. An index of weight 0 is returned only if all are 0. The search has two levels, because a
    cumulative sum over the whole vocabulary takes longer than everything else. The order of sums is fixed, and
    cumulative sums are of integers, so that a row's index does not depend on the other rows.
    """
    size = weights.shape[1]
    blocks = pad(weights, (0, -size % BLOCK)).view(len(weights), -1, BLOCK)
    sums = _sum_in_pairs(blocks).double()
    target = (uniforms * UNITS).long()[:, None]
    block, start = _search(sums, target)
    mass = sums.gather(1, block)
    share = (target - start) * (_total(sums) / mass.clamp(min=TINY))  # of the block, in units
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double()
    place, _ = _search(inside, share.long())
    return (block * BLOCK + place)[:, 0].clamp_(max=size - 1)


def _search(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index [n, 1] where the cumulative sum exceeds the target, and the sum before it, in units."""
    edges = (weights * (UNITS / _total(weights).clamp(min=TINY))).long().cumsum(-1)
    inside = torch.minimum(target.clamp(min=0), edges[:, -1:] - 1)  # rounding may have moved it past the last edge
    index = torch.searchsorted(edges, inside.contiguous(), right=True).clamp_(max=edges.shape[1] - 1)
    before = edges.gather(1, (index - 1).clamp(min=0)).masked_fill(index == 0, 0)
    return index, before


def _total(weights: Tensor) -> Tensor:
    """Return the sums of rows [n, 1], added in an order that only depends on their length."""
    return _sum_in_pairs(weights)[:, None]


def _sum_in_pairs(weights: Tensor) -> Tensor:
    """Sum over the last dimension by adding halves, because the order of `torch.sum` depends on all dimensions."""
    while weights.shape[-1] > 1:
        half = (weights.shape[-1] + 1) // 2
        weights = weights[..., :half] + pad(weights[..., half:], (0, 2 * half - weights.shape[-1]))
    return weights[..., 0]
