"""Ranks that each get a part of every batch: their start, and the split of batches over them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from plasmid.components import BuildContext
from plasmid.protocols import Actor, Bundle, Resources, SampleScores
from plasmid.types import Role
from plasmid.types.batch import BatchRef

from ..batches.rank_batch import RankBatch, split
from ..batches.schedule import Microbatching
from ..rank.calls import ConnectedRank, MakeBackend, RankPosition, RankSetup, ScoringRank, launch, name_of
from .group import RankGroup

T = TypeVar("T")


class BatchRanks:
    """All ranks of the trainer, or of a model on dedicated ranks."""

    def __init__(self, group: RankGroup, *, microbatching: Microbatching, with_metadata: bool = False) -> None:
        self.group = group
        self._positions: tuple[RankPosition, ...] = ()
        self._microbatching, self._with_metadata = microbatching, with_metadata

    async def connect(self, timeout_s: float) -> None:
        """Connect the ranks and load the models."""
        ranks = self.group.with_timeout(timeout_s)
        url = await ranks.call_first(ConnectedRank.listen)
        self._positions = tuple(await ranks.call_all(ConnectedRank.join, url))

    def split(self, batch: BatchRef) -> list[RankBatch]:
        """Return the shares of all ranks in rank order."""
        parts = split(
            batch,
            num_ranks=len(self.reporting_ranks),
            microbatching=self._microbatching,
            with_metadata=self._with_metadata,
        )
        return [parts[position.part] for position in self._positions]

    @property
    def reporting_ranks(self) -> list[int]:
        """The rank of every part whose results are used."""
        return [rank for rank, position in enumerate(self._positions) if position.reports]

    def in_batch_order(self, parts: Sequence[RankBatch], values: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
        """Return the values of every sample from those of all ranks."""
        by_sample: dict[int, T] = {}
        for rank in self.reporting_ranks:
            by_sample |= dict(zip(parts[rank].samples, values[rank], strict=True))
        return tuple(by_sample[i] for i in range(len(by_sample)))

    async def score(self, batch: BatchRef) -> tuple[SampleScores, ...]:
        """Return the scores of each sample by a model on dedicated ranks, in batch order."""
        parts = self.split(batch)
        return self.in_batch_order(parts, await self.group.call_each(ScoringRank.score, parts))


async def start_groups(
    context: BuildContext, make_backend: MakeBackend, config: dict[str, object], timeout_s: float
) -> tuple[dict[Role, RankGroup], BaseException | None]:
    """Start the processes of the trainer and of every model on dedicated ranks, concurrently.

    ``config`` is the recipe for them. Returns the groups of all started processes, by their model, and the first error.
    """
    bundles = {Role.POLICY: context.bundles, **context.role_bundles}

    async def start(role: Role, rank: int, bundle: Bundle) -> Actor:
        setup = RankSetup(
            config=config,
            role=role,
            rank=rank,
            num_ranks=len(bundles[role]),
            device="cuda" if context.on_gpu else "cpu",
            threads=context.threads,
            run_dir=context.run_dir.absolute(),
        )
        return await context.cluster.start(
            launch,
            make_backend,
            setup,
            name=setup.name,
            resources=Resources(bundles=(bundle,), env={"OMP_NUM_THREADS": str(context.threads)}),
            timeout_s=context.config.placement.start_timeout_s,
        )

    outcomes = {
        role: asyncio.gather(*(start(role, *one) for one in enumerate(own)), return_exceptions=True)
        for role, own in bundles.items()
    }
    await asyncio.gather(*outcomes.values())
    started = {role: outcome.result() for role, outcome in outcomes.items()}
    groups = {
        role: RankGroup(
            [actor for actor in own if not isinstance(actor, BaseException)], timeout_s=timeout_s, name=name_of(role)
        )
        for role, own in started.items()
    }
    return groups, next((one for one in chain(*started.values()) if isinstance(one, BaseException)), None)
