"""The driver's handle of a trainer with one process per rank, for any backend. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plasmid.components import BuildContext
from plasmid.protocols import Actor, Finish, Resources, ScoresRef, SyncPlan, TrainReport
from plasmid.types import Floats, Role, SyncReceipt
from plasmid.types.batch import BatchRef

from .batches.rank_batch import RankBatch, split
from .batches.schedule import Microbatching
from .rank.calls import MakeBackend, Rank, RankPosition, RankSetup, launch
from .rank.group import RankGroup

log = logging.getLogger(__name__)
KNOWN = ("float32", "bfloat16")


def config_of_ranks(context: BuildContext) -> dict[str, Any]:
    """Return the recipe for the trainer's ranks, with ``trainer.dtype = "auto"`` replaced by the engine's dtype.

    The engine gets weights rounded to its dtype, and an update at a typical learning rate is below the resolution of
    bfloat16: the policy of a trainer that computes with unrounded weights soon differs by nats from the policy that the
    engine samples from.
    """
    config = context.config.model_dump(mode="json")
    engine = _engine_dtype(context)
    wanted = config["trainer"]["dtype"]
    config["trainer"]["dtype"] = found = engine if wanted == "auto" else wanted
    if context.config.rollout is not None and found != engine:
        log.warning(
            "trainer.dtype is %s, but the engine's dtype is %s: small updates are rounded away in the engine only; "
            "set both to the same dtype, or remove trainer.dtype",
            found,
            engine,
        )
    return config


def _engine_dtype(context: BuildContext) -> str:
    """Return the engine's dtype; without an engine, or with a dtype not in `KNOWN`, the default of engines."""
    chosen = getattr(context.config.rollout, "dtype", "auto")
    return chosen if chosen in KNOWN else "bfloat16" if context.on_gpu else "float32"


async def start_ranks(
    context: BuildContext, make_backend: MakeBackend, *, microbatching: Microbatching, async_save: bool = False
) -> RankedTrainer:
    """Start one process per bundle and connect them; after an error, no process is left running.

    With ``async_save`` checkpoints are written in the background.
    """
    config = context.config
    timeout_s, threads, device = config.placement.start_timeout_s, context.threads, "cuda" if context.on_gpu else "cpu"
    of_ranks, num_ranks = config_of_ranks(context), len(context.bundles)
    setups = [
        RankSetup(
            config=of_ranks,
            rank=rank,
            num_ranks=num_ranks,
            device=device,
            threads=threads,
            run_dir=context.run_dir.absolute(),
        )
        for rank in range(num_ranks)
    ]
    starts = [
        context.cluster.start(
            launch,
            make_backend,
            setup,
            name=f"trainer-{setup.rank}",
            resources=Resources(bundles=(bundle,), env={"OMP_NUM_THREADS": str(threads)}),
            timeout_s=timeout_s,
        )
        for setup, bundle in zip(setups, context.bundles, strict=True)
    ]
    started = await asyncio.gather(*starts, return_exceptions=True)
    trainer = RankedTrainer(
        [actor for actor in started if not isinstance(actor, BaseException)],
        microbatching=microbatching,
        timeout_s=config.run.train_timeout_s,
        sync_timeout_s=config.run.sync_timeout_s,
        async_save=async_save,
        with_metadata=config.algorithm.needs().metadata,
    )
    try:
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome
        await trainer.connect(timeout_s)
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
        async_save: bool = False,
        with_metadata: bool = False,
    ) -> None:
        self._ranks = RankGroup(actors, timeout_s=timeout_s)
        self._positions: tuple[RankPosition, ...] = ()
        self._microbatching = microbatching
        self._sync_timeout_s = sync_timeout_s
        self._saves_behind = async_save
        self._with_metadata = with_metadata
        self._step = 0

    @property
    def step(self) -> int:
        """The policy's optimizer steps so far, including those skipped because of non-finite gradients."""
        return self._step

    async def connect(self, timeout_s: float) -> None:
        """Connect the ranks and load the models."""
        ranks = self._ranks.with_timeout(timeout_s)
        self._positions = tuple(await ranks.call_all(Rank.join, await ranks.call_first(Rank.listen)))

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        """Compute per-token scores of all samples, which are kept on the ranks until the batch has been trained."""
        if roles:
            await self._ranks.call_each(Rank.score, self._split(batch), tuple(roles))
        return ScoresRef(batch=batch.index, roles=tuple(roles))

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        """Take ``batch.steps`` optimizer steps."""
        if scores.batch != batch.index:
            raise ValueError(f"the scores belong to batch {scores.batch}, not to batch {batch.index}")
        reports = await self._ranks.call_each(Rank.train, self._split(batch))
        steps = reports[self._reporting_ranks()[0]]
        self._step = int(steps[-1]["train/step"])
        return TrainReport(steps=steps)

    async def logprobs(self, batch: BatchRef) -> tuple[Floats, ...]:
        """Return the policy's log-probabilities [L] (float32) of each sample, in batch order."""
        parts = self._split(batch)
        arrays = await self._ranks.call_each(Rank.logprobs, parts)
        by_sample: dict[int, Floats] = {}
        for rank in self._reporting_ranks():
            by_sample |= dict(zip(parts[rank].samples, arrays[rank], strict=True))
        return tuple(by_sample[i] for i in range(len(by_sample)))

    async def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Send all weights over the plan's wire; return rank 0's receipt."""
        return (await self._ranks.with_timeout(self._sync_timeout_s).call_all(Rank.send, plan, version))[0]

    async def save(self, path: Path) -> Finish | None:
        """Write the sharded state into the folder; see `protocols.Trainer` for the result."""
        if not any(await self._ranks.call_all(Rank.save, path.absolute())):
            return None
        if self._saves_behind:
            return self._finish_save
        await self._finish_save()
        return None

    async def _finish_save(self) -> None:
        await self._ranks.call_first(Rank.commit_save, await self._ranks.call_all(Rank.finish_shards))

    async def load(self, path: Path) -> None:
        """Restore a saved state exactly, also with another number of ranks."""
        self._step = (await self._ranks.call_all(Rank.load, path.absolute()))[0]

    async def export(self, path: Path) -> None:
        """Export a Hugging Face folder."""
        await self._ranks.call_all(Rank.export, path.absolute())

    async def offload(self) -> None:
        """Move everything off the GPU."""
        await self._ranks.call_all(Rank.offload)

    async def onload(self) -> None:
        """Undo `offload`."""
        await self._ranks.call_all(Rank.onload)

    async def metrics(self) -> Mapping[str, float]:
        """Return memory metrics of all ranks, and the utilization of their GPUs."""
        return {name: value for part in await self._ranks.call_all(Rank.metrics) for name, value in part.items()}

    async def close(self) -> None:
        """Stop the ranks."""
        await self._ranks.stop()

    def _split(self, batch: BatchRef) -> list[RankBatch]:
        """Return the shares of all ranks in rank order."""
        parts = split(
            batch,
            num_ranks=len(self._reporting_ranks()),
            microbatching=self._microbatching,
            with_metadata=self._with_metadata,
        )
        return [parts[position.part] for position in self._positions]

    def _reporting_ranks(self) -> list[int]:
        return [rank for rank, position in enumerate(self._positions) if position.reports]
