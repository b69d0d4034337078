"""The driver's handle of a trainer that is a group of ranks, whatever backend they run. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from plasmid.components import BuildContext
from plasmid.protocols import Actor, Finish, Resources, ScoresRef, SyncPlan, TrainReport
from plasmid.types import Floats, Role, SyncReceipt
from plasmid.types.batch import BatchRef

from .batches.rank_batch import RankBatch, split
from .batches.schedule import Microbatching
from .number_type import config_of_ranks
from .rank.calls import MakeBackend, Rank, RankPosition, RankSetup, launch
from .rank.group import RankGroup


async def start_ranks(
    context: BuildContext, make_backend: MakeBackend, *, microbatching: Microbatching, saves_behind: bool = False
) -> RankedTrainer:
    """Start one process for each bundle and let them meet; nothing is left running after an error.

    With ``saves_behind`` checkpoints are written while training goes on.
    """
    config = context.config
    timeout_s, threads, device = config.placement.start_timeout_s, context.threads, "cuda" if context.on_gpu else "cpu"
    of_ranks, num_ranks = config_of_ranks(context), len(context.bundles)
    starts = [
        context.cluster.start(
            launch,
            make_backend,
            RankSetup(config=of_ranks, rank=rank, num_ranks=num_ranks, device=device, threads=threads),
            name=f"trainer-{rank}",
            resources=Resources(bundles=(bundle,), env={"OMP_NUM_THREADS": str(threads)}),
            timeout_s=timeout_s,
        )
        for rank, bundle in enumerate(context.bundles)
    ]
    started = await asyncio.gather(*starts, return_exceptions=True)
    trainer = RankedTrainer(
        [actor for actor in started if not isinstance(actor, BaseException)],
        microbatching=microbatching,
        timeout_s=config.run.train_timeout_s,
        sync_timeout_s=config.run.sync_timeout_s,
        saves_behind=saves_behind,
        with_metadata=config.algorithm.needs().metadata,
    )
    try:
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome
        await trainer.meet(timeout_s)
    except BaseException:
        await trainer.close()
        raise
    return trainer


class RankedTrainer:
    """Implements `protocols.Trainer`."""

    def __init__(
        self,
        actors: Sequence[Actor],
        *,
        microbatching: Microbatching,
        timeout_s: float,
        sync_timeout_s: float,
        saves_behind: bool = False,
        with_metadata: bool = False,
    ) -> None:
        self._ranks = RankGroup(actors, timeout_s=timeout_s)
        self._positions: tuple[RankPosition, ...] = ()
        self._microbatching = microbatching
        self._sync_timeout_s = sync_timeout_s
        self._saves_behind = saves_behind
        self._with_metadata = with_metadata
        self._step = 0

    @property
    def step(self) -> int:
        """The policy's optimizer steps so far, those skipped for a gradient that was not finite included."""
        return self._step

    async def meet(self, timeout_s: float) -> None:
        """Let the ranks find each other and load the model."""
        ranks = self._ranks.within(timeout_s)
        self._positions = tuple(await ranks.all(Rank.join, await ranks.first(Rank.listen)))

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        """Per-token scores of every sample; they stay on the ranks until the batch has been trained."""
        if roles:
            await self._ranks.each(Rank.score, self._split(batch), tuple(roles))
        return ScoresRef(batch=batch.index, roles=tuple(roles))

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        """``batch.steps`` optimizer steps."""
        if scores.batch != batch.index:
            raise ValueError(f"scores are of batch {scores.batch}, not of batch {batch.index}")
        reports = await self._ranks.each(Rank.train, self._split(batch))
        steps = reports[self._reporting()[0]]
        self._step = int(steps[-1]["train/step"])
        return TrainReport(steps=steps)

    async def logprobs(self, batch: BatchRef) -> tuple[Floats, ...]:
        """[L] float32 array of the policy's log-probabilities per sample, in batch order."""
        parts = self._split(batch)
        arrays = await self._ranks.each(Rank.logprobs, parts)
        by_sample: dict[int, Floats] = {}
        for rank in self._reporting():
            by_sample |= dict(zip(parts[rank].samples, arrays[rank], strict=True))
        return tuple(by_sample[i] for i in range(len(by_sample)))

    async def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Send every weight along the plan's wire; the receipt is rank 0's."""
        return (await self._ranks.within(self._sync_timeout_s).all(Rank.send, plan, version))[0]

    async def save(self, path: Path) -> Finish | None:
        """Write the sharded state into the folder; see `protocols.Trainer` for what is returned."""
        if not any(await self._ranks.all(Rank.save, path.absolute())):
            return None
        if self._saves_behind:
            return self._written
        await self._written()
        return None

    async def _written(self) -> None:
        await self._ranks.first(Rank.conclude, await self._ranks.all(Rank.written))

    async def load(self, path: Path) -> None:
        """Take up a saved state exactly, also with another number of ranks."""
        self._step = (await self._ranks.all(Rank.load, path.absolute()))[0]

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder."""
        await self._ranks.all(Rank.export, path.absolute())

    async def offload(self) -> None:
        """Move everything off the GPU."""
        await self._ranks.all(Rank.offload)

    async def onload(self) -> None:
        """Undo `offload`."""
        await self._ranks.all(Rank.onload)

    async def metrics(self) -> Mapping[str, float]:
        """Memory of every rank, and its GPU's load where there is one."""
        return {name: value for part in await self._ranks.all(Rank.metrics) for name, value in part.items()}

    async def close(self) -> None:
        """Stop the ranks."""
        await self._ranks.stop()

    def _split(self, batch: BatchRef) -> list[RankBatch]:
        """Every rank's share, in rank order."""
        parts = split(
            batch,
            num_ranks=len(self._reporting()),
            microbatching=self._microbatching,
            with_metadata=self._with_metadata,
        )
        return [parts[position.part] for position in self._positions]

    def _reporting(self) -> list[int]:
        return [rank for rank, position in enumerate(self._positions) if position.reports]
