"""Who computes what: a batch is dealt out to optimizer steps, ranks and microbatches. Indices are rows of the table."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from plasmid.types.batch import BatchTable

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatching:
    """How large a microbatch may be."""

    unit: Literal["samples", "tokens", "packed"]
    """Count samples, tokens with padding (rows padded on the right: n rows cost n times the longest), or packed tokens
    (rows one after another: they cost their lengths)."""
    size: int
    """Most of them in one microbatch. A sample of more tokens than that sits alone."""
    multiple: int = 1
    """The number of microbatches of every optimizer step is a multiple of this; empty ones fill it up."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a microbatch must hold at least one of {self.unit}, got {self.size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """One optimizer step."""

    samples: Indices
    """Every sample of the step, ascending."""
    ranks: tuple[tuple[Indices, ...], ...]
    """Rank -> microbatch -> samples. Each rank has equally many microbatches, because they run collectives; some of
    them may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A whole batch. Every sample is in exactly one microbatch of one rank in one step."""

    steps: tuple[StepSchedule, ...]


def make_schedule(table: BatchTable, *, steps: int, num_ranks: int, microbatching: Microbatching) -> Schedule:
    """Deal a batch out. Depends on nothing but the arguments, so every process arrives at the same schedule."""
    lengths = [int(length) for length in table.lengths]
    planned = []
    for samples in deal_to_steps(table, steps):
        held = balance(samples, lengths, num_ranks=num_ranks, equal_counts=microbatching.unit == "samples")
        ranks = [pack(indices, lengths, microbatching) for indices in held]
        count = max(len(microbatches) for microbatches in ranks)
        count += -count % microbatching.multiple
        padded = tuple(tuple([*m, *[()] * (count - len(m))]) for m in ranks)
        planned.append(StepSchedule(samples=samples, ranks=padded))
    return Schedule(steps=tuple(planned))


def deal_to_steps(table: BatchTable, steps: int) -> tuple[Indices, ...]:
    """Samples of each step: whole rollouts in order of first occurrence, in counts that differ by at most one."""
    num_rollouts = int(table.rollout_index.max()) + 1 if table.num_samples else 0
    if not 1 <= steps <= num_rollouts:
        raise ValueError(f"{num_rollouts} rollouts cannot be dealt out to {steps} steps")
    parts = np.array_split(np.arange(num_rollouts), steps)
    step_of = np.repeat(np.arange(steps), [len(part) for part in parts])[table.rollout_index]
    return tuple(tuple(np.flatnonzero(step_of == step).tolist()) for step in range(steps))


def balance(
    samples: Sequence[int], lengths: Sequence[int], *, num_ranks: int, equal_counts: bool
) -> tuple[Indices, ...]:
    """Samples of each rank: the longest first, each to the rank with the fewest tokens (Graham 1969, LPT rule).

    ``equal_counts`` keeps the numbers of samples within one of each other, for microbatches of a fixed size.
    """
    room = [len(samples) // num_ranks + (rank < len(samples) % num_ranks) for rank in range(num_ranks)]
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks) if room[rank] or not equal_counts]
    for sample in sorted(samples, key=lambda i: (-lengths[i], i)):
        tokens, rank = heapq.heappop(loads)
        held[rank].append(sample)
        if not equal_counts or len(held[rank]) < room[rank]:
            heapq.heappush(loads, (tokens + lengths[sample], rank))
    return tuple(map(tuple, held))


def pack(samples: Sequence[int], lengths: Sequence[int], microbatching: Microbatching) -> tuple[Indices, ...]:
    """Microbatches of one rank, the longest samples first: what needs most memory fails early and pads least."""
    packed: list[list[int]] = []
    for sample in sorted(samples, key=lambda i: (-lengths[i], i)):
        if packed and _fits(packed[-1], sample, lengths, microbatching):
            packed[-1].append(sample)
        else:
            packed.append([sample])
    return tuple(map(tuple, packed))


def _fits(microbatch: Sequence[int], sample: int, lengths: Sequence[int], microbatching: Microbatching) -> bool:
    """True if one more sample, no longer than the first, has room."""
    rows = len(microbatch) + 1
    if microbatching.unit == "packed":
        return sum(lengths[i] for i in microbatch) + lengths[sample] <= microbatching.size
    cost = rows if microbatching.unit == "samples" else rows * lengths[microbatch[0]]
    return cost <= microbatching.size
