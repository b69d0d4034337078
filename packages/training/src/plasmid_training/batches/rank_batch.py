"""The share of a batch sent to one trainer rank: the table, its part of the schedule, references to its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plasmid.protocols import Ref, SampleScores
from plasmid.types import Floats, PromptGroup, Role
from plasmid.types.batch import BatchRef, BatchTable, Rows

from .sample_costs import Indices
from .schedule import Microbatching, make_schedule

NO_METADATA = "sample metadata is only sent to algorithms whose needs() returns Needs(metadata=True)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's part of an optimizer step."""

    samples: Indices
    """Rows of the table in the step on all ranks, ascending; loss weights are computed from them."""
    microbatches: tuple[Indices, ...]
    """Indices into `RankBatch.samples` (and the fetched rows). Every rank has the same number; some may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowsPart:
    """Samples of one prompt group that a rank needs."""

    rows: Ref[Rows]
    """All samples of the group."""
    picked: Indices
    """Indices of the needed samples, ascending."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBatch:
    """One rank's share of a batch. Picklable; holds no tokens."""

    index: int
    """Number of the batch in the run, from 0."""
    table: BatchTable
    """All samples of the batch, including those of other ranks."""
    samples: Indices
    """[n] rows of the table that this rank holds, ascending."""
    steps: tuple[RankStep, ...]
    parts: tuple[RowsPart, ...]
    prefixes: Indices = ()
    """[n] number of leading tokens that each sample shares with its group in a microbatch; empty if there are none."""
    received: Mapping[Role, tuple[SampleScores, ...]] = field(default_factory=dict)
    """[n] scores of each sample by models on dedicated ranks (`ScoresRef.received`)."""
    returns: tuple[Floats, ...] = ()
    """[n] targets of each sample's values, for the training of a critic on dedicated ranks."""
    groups: tuple[Ref[PromptGroup], ...] = ()
    """All groups of the batch, if the algorithm needs metadata of samples (`Needs.metadata`)."""

    @cached_property
    def metadata(self) -> tuple[Mapping[str, Any], ...]:
        """[N] `Sample.metadata` of each row of the table. Fetches the groups of all ranks."""
        if not self.groups and self.table.num_samples:
            raise ValueError(NO_METADATA)
        found = {sample.id: sample.metadata for ref in self.groups for sample in ref.get().samples}
        return tuple(found[id_] for id_ in self.table.sample_ids)

    def fetch(self) -> Rows:
        """Fetch this rank's samples; row j is row ``samples[j]`` of the table. Blocks until they have arrived."""
        if not self.parts:
            return Rows.empty()
        rows = Rows.concat([part.rows.get().select(part.picked) for part in self.parts])
        expected = tuple(self.table.sample_ids[i] for i in self.samples)
        if rows.sample_ids != expected:
            raise ValueError(f"batch {self.index}: the fetched rows are not those of the table")
        return rows


def split(
    batch: BatchRef, *, num_ranks: int, microbatching: Microbatching, with_metadata: bool = False
) -> tuple[RankBatch, ...]:
    """Split a batch into the shares of all ranks, without access to the tokens."""
    groups = tuple(group.whole for group in batch.groups) if with_metadata else ()
    table = batch.table()
    schedule = make_schedule(table, steps=batch.steps, num_ranks=num_ranks, microbatching=microbatching)
    firsts = np.cumsum([0, *(group.num_samples for group in batch.groups)])
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
        prefixes = tuple(schedule.prefixes[i] for i in samples)
        ranks.append(
            RankBatch(
                index=batch.index,
                table=table,
                samples=samples,
                steps=steps,
                parts=_parts(batch, samples, firsts),
                prefixes=prefixes if any(prefixes) else (),
                groups=groups,
            )
        )
    return tuple(ranks)


def _parts(batch: BatchRef, samples: Indices, firsts: NDArray[np.int64]) -> tuple[RowsPart, ...]:
    """Return the references to the samples; ``firsts`` are the first rows of each group in the table."""
    cuts = np.searchsorted(samples, firsts).tolist()
    parts = []
    for group, first, (a, b) in zip(batch.groups, firsts.tolist(), pairwise(cuts), strict=False):
        if a < b:
            parts.append(RowsPart(rows=group.rows, picked=tuple(i - first for i in samples[a:b])))
    return tuple(parts)
