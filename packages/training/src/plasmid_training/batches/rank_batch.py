"""What one trainer rank is sent of a batch: the table, its part of the schedule, and references to its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from plasmid.protocols import Ref
from plasmid.types import PromptGroup
from plasmid.types.batch import BatchRef, BatchTable, Rows

from .schedule import Indices, Microbatching, make_schedule

NO_METADATA = "metadata of samples is only sent to algorithms whose needs() has Needs(metadata=True)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One optimizer step as one rank sees it."""

    samples: Indices
    """Rows of the table that are in the step on any rank, ascending; loss weights are computed from them."""
    microbatches: tuple[Indices, ...]
    """Positions in `RankBatch.samples` (and so in the fetched rows); equally many on every rank, some may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowsPart:
    """Samples of one prompt group that a rank needs."""

    rows: Ref[Rows]
    """All samples of the group."""
    picked: Indices
    """Which of them, ascending."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBatch:
    """One rank's share of a batch. Picklable; holds no tokens."""

    index: int
    """Number of the batch in the run, from 0."""
    table: BatchTable
    """All samples of the batch, also those of other ranks."""
    samples: Indices
    """[n] rows of the table that this rank holds, ascending."""
    steps: tuple[RankStep, ...]
    parts: tuple[RowsPart, ...]
    groups: tuple[Ref[PromptGroup], ...] = ()
    """All groups of the batch, if the algorithm needs metadata of samples (`Needs.metadata`)."""

    @cached_property
    def metadata(self) -> tuple[Mapping[str, Any], ...]:
        """[N] `Sample.metadata` of each row of the table. Fetches the groups of all ranks' samples."""
        if not self.groups and self.table.num_samples:
            raise ValueError(NO_METADATA)
        found = {sample.id: sample.metadata for ref in self.groups for sample in ref.get().samples}
        return tuple(found[id_] for id_ in self.table.sample_ids)

    def fetch(self) -> Rows:
        """This rank's samples; row j is row ``samples[j]`` of the table. Blocks until they are here."""
        if not self.parts:
            return Rows.empty()
        rows = Rows.concat([part.rows.get().select(part.picked) for part in self.parts])
        expected = tuple(self.table.sample_ids[i] for i in self.samples)
        if rows.sample_ids != expected:
            raise ValueError(f"batch {self.index}: the rows fetched are not those of the table")
        return rows


def split(
    batch: BatchRef, *, num_ranks: int, microbatching: Microbatching, with_metadata: bool = False
) -> tuple[RankBatch, ...]:
    """Deal a batch out to the ranks; runs where no token is."""
    groups = tuple(group.whole for group in batch.groups) if with_metadata else ()
    table = batch.table()
    schedule = make_schedule(table, steps=batch.steps, num_ranks=num_ranks, microbatching=microbatching)
    ranks = []
    for rank in range(num_ranks):
        samples = tuple(sorted(i for step in schedule.steps for part in step.ranks[rank] for i in part))
        place = {sample: position for position, sample in enumerate(samples)}
        steps = tuple(
            RankStep(
                samples=step.samples,
                microbatches=tuple(tuple(place[i] for i in part) for part in step.ranks[rank]),
            )
            for step in schedule.steps
        )
        parts = _parts(batch, samples)
        ranks.append(
            RankBatch(index=batch.index, table=table, samples=samples, steps=steps, parts=parts, groups=groups)
        )
    return tuple(ranks)


def _parts(batch: BatchRef, samples: Indices) -> tuple[RowsPart, ...]:
    """Where the samples are; the table lists them group after group."""
    firsts = np.cumsum([0, *(group.num_samples for group in batch.groups)]).tolist()
    held = set(samples)
    picked = [tuple(i - a for i in range(a, b) if i in held) for a, b in pairwise(firsts)]
    return tuple(RowsPart(rows=g.rows, picked=p) for g, p in zip(batch.groups, picked, strict=True) if p)
