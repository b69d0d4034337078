"""Assignment of a batch's samples to optimizer steps, ranks and microbatches. Indices are rows of the table."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from plasmid.types.batch import BatchTable

from .sample_costs import Indices, SampleCosts

BALANCED = 1.02
"""Ratio of the highest to the mean load of the ranks below which groups are not split any further."""

CPU_SAVING, GPU_SAVING = 0.05, 0.2
"""Minimum fraction of a group's tokens that sharing its prefix must save for ``share_prefixes = "auto"`` to do it."""


def min_saving(share: Literal["auto"] | bool, *, on_gpu: bool) -> float | None:
    """Return `Microbatching.min_saving` of the setting ``share_prefixes``."""
    if share == "auto":
        return GPU_SAVING if on_gpu else CPU_SAVING
    return 0.0 if share else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatching:
    """Size limit of microbatches, and the cost model of samples."""

    unit: Literal["samples", "tokens", "packed"]
    """Unit of `size`. samples: number of samples. tokens: tokens including padding (n rows count as n times the longest
    row). packed: tokens without padding, counting shared prefixes once."""
    size: int
    """Maximum per microbatch, in `unit`. A sample with more tokens gets its own microbatch."""
    multiple: int = 1
    """The number of microbatches per optimizer step is padded to a multiple of this with empty ones."""
    attention_length: float = float("inf")
    """Sample length at which attention costs as much as everything else (`sample_costs.attention_length`)."""
    min_saving: float | None = None
    """Minimum fraction of a group's tokens that sharing its prefix within a microbatch must save; None never shares."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the size of a microbatch must be at least 1 ({self.unit}), got {self.size}")
        if self.unit == "tokens" and self.min_saving is not None:
            raise ValueError("padded samples cannot share prefixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """One optimizer step."""

    samples: Indices
    """All samples of the step, ascending."""
    ranks: tuple[tuple[Indices, ...], ...]
    """Samples of each microbatch of each rank. All ranks have the same number of microbatches, because they run
    collectives; some may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Schedule of a batch. Every sample is in exactly one microbatch of one rank in one step."""

    steps: tuple[StepSchedule, ...]
    prefixes: Indices
    """Number of leading tokens of each sample that the samples of its group share in a microbatch; 0 for none."""


def make_schedule(table: BatchTable, *, steps: int, num_ranks: int, microbatching: Microbatching) -> Schedule:
    """Schedule a batch. Depends on the arguments only, so every process computes the same schedule."""
    costs = SampleCosts.of(table, attention_length=microbatching.attention_length, min_saving=microbatching.min_saving)
    planned = []
    for samples in split_into_steps(table, steps):
        assigned = assign_to_ranks(samples, costs, num_ranks=num_ranks, equal_counts=microbatching.unit == "samples")
        ranks = [pack(indices, costs, microbatching) for indices in assigned]
        count = max(len(microbatches) for microbatches in ranks)
        count += -count % microbatching.multiple
        padded = tuple(tuple([*m, *[()] * (count - len(m))]) for m in ranks)
        planned.append(StepSchedule(samples=samples, ranks=padded))
    return Schedule(steps=tuple(planned), prefixes=tuple(costs.prefixes))


def split_into_steps(table: BatchTable, steps: int) -> tuple[Indices, ...]:
    """Return the samples of each step: whole rollouts in order of first occurrence; counts differ by at most 1."""
    num_rollouts = int(table.rollout_index.max()) + 1 if table.num_samples else 0
    if not 1 <= steps <= num_rollouts:
        raise ValueError(f"{num_rollouts} rollouts cannot be split into {steps} steps")
    parts = np.array_split(np.arange(num_rollouts), steps)
    step_of = np.repeat(np.arange(steps), [len(part) for part in parts])[table.rollout_index]
    return tuple(tuple(np.flatnonzero(step_of == step).tolist()) for step in range(steps))


def assign_to_ranks(samples: Indices, costs: SampleCosts, *, num_ranks: int, equal_counts: bool) -> tuple[Indices, ...]:
    """Return the samples of each rank, so that all ranks compute about the same number of FLOPs.

    Groups that share a prefix stay together unless splitting all of them into the same number of pieces, each of which
    recomputes the prefix, balances the ranks better. With ``equal_counts`` samples are assigned one by one.
    """
    if num_ranks == 1:
        return (samples,)
    if equal_counts:
        return balance(samples, costs.flops, num_ranks=num_ranks, equal_counts=True)
    best: tuple[Indices, ...] = ()
    lightest, pieces, before = math.inf, 1, 0
    units = costs.units(samples)
    enough = BALANCED * sum(map(costs.unit_flops, units)) / num_ranks
    while lightest > enough and len(units) > before:  # more pieces until each has one sample
        flops = list(map(costs.unit_flops, units))
        assigned = balance(range(len(units)), flops, num_ranks=num_ranks, equal_counts=False)
        heaviest = max(sum(flops[unit] for unit in rank) for rank in assigned)
        if heaviest < lightest:
            lightest, best = heaviest, tuple(tuple(i for unit in rank for i in units[unit]) for rank in assigned)
        before, pieces = len(units), 2 * pieces
        units = costs.units(samples, pieces)
    return best


def balance(
    samples: Sequence[int], costs: Sequence[float], *, num_ranks: int, equal_counts: bool
) -> tuple[Indices, ...]:
    """Assign samples to ranks: the most expensive first, each to the least loaded rank (Graham 1969, LPT rule).

    With ``equal_counts`` the numbers of samples differ by at most 1, for microbatches of a fixed size.
    """
    room = [len(samples) // num_ranks + (rank < len(samples) % num_ranks) for rank in range(num_ranks)]
    assigned: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks) if room[rank] or not equal_counts]
    for sample in sorted(samples, key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        assigned[rank].append(sample)
        if not equal_counts or len(assigned[rank]) < room[rank]:
            heapq.heappush(loads, (load + costs[sample], rank))
    return tuple(map(tuple, assigned))


def pack(samples: Sequence[int], costs: SampleCosts, microbatching: Microbatching) -> tuple[Indices, ...]:
    """Return the microbatches of one rank, longest samples first, so that out-of-memory errors occur early.

    The order also minimizes padding. Samples that share a prefix stay together as far as they fit into one microbatch.
    """
    lengths, size = costs.lengths, microbatching.size
    units = sorted(costs.units(samples), key=lambda unit: (-lengths[unit[0]], unit[0]))
    if microbatching.unit == "samples":
        ordered = [i for unit in units for i in unit]
        return tuple(tuple(ordered[start : start + size]) for start in range(0, len(ordered), size))
    packed: list[list[int]] = []
    used = 0
    for part in (part for unit in units for part in _split_unit(unit, costs, microbatching)):
        if microbatching.unit == "packed":
            needed = used + costs.unit_tokens(part)
        else:
            needed = (len(packed[-1]) + 1) * lengths[packed[-1][0]] if packed else 0
        if packed and needed <= size:
            packed[-1] += part
            used = needed
        else:
            packed.append([*part])
            used = costs.unit_tokens(part)
    return tuple(map(tuple, packed))


def _split_unit(unit: Indices, costs: SampleCosts, microbatching: Microbatching) -> Iterator[Indices]:
    """Split a unit, whose samples are sorted by decreasing length, into parts that fit into a microbatch."""
    prefix, start, used = costs.prefixes[unit[0]], 0, 0
    for end, sample in enumerate(unit):
        own = costs.lengths[sample] - prefix
        if end > start and used + own > microbatching.size:
            yield unit[start:end]
            start = end
        used = own + prefix if start == end else used + own
    yield unit[start:]
