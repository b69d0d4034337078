"""The driver's handle of a trainer that is a group of ranks, whatever backend they run. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plasmid.components import BuildContext
from plasmid.errors import ActorDiedError, DeadlineError, PlasmidError
from plasmid.protocols import Actor, Finish, Resources, ScoresRef, SyncPlan, TrainReport
from plasmid.types import Floats, Role, SyncReceipt
from plasmid.types.batch import BatchRef

from .batches.rank_batch import RankBatch, split
from .batches.schedule import Microbatching

GRACE_S = 2.0
"""After one rank has failed: how long the others may take to say why it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a rank does for a batch, told by the rank when it has met the others."""

    part: int
    """Which part of every batch it works on; ranks that share a model replica share a part."""
    answers: bool
    """True for the one rank of every part whose metrics and log-probabilities count."""


async def start_ranks(
    context: BuildContext,
    launch: Callable[[Any], Any],
    setups: Sequence[Any],
    *,
    microbatching: Microbatching,
    saves_behind: bool = False,
) -> RankedTrainer:
    """Start one process for each setup and let them meet; nothing is left running after an error.

    ``launch`` makes the rank's object out of its setup, in the rank's process. Its methods are those that
    `RankedTrainer` calls; besides ``listen``, asked of the first, and ``join``, which returns the rank's `Seat`.
    With ``saves_behind`` checkpoints are written while training goes on.
    """
    config = context.config
    timeout_s, threads = config.placement.start_timeout_s, context.threads
    starts = [
        context.cluster.start(
            launch,
            setup,
            name=f"trainer-{rank}",
            resources=Resources(bundles=(bundle,), env={"OMP_NUM_THREADS": str(threads)}),
            timeout_s=timeout_s,
        )
        for rank, (setup, bundle) in enumerate(zip(setups, context.bundles, strict=True))
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
        self._actors = tuple(actors)
        self._seats: tuple[Seat, ...] = ()
        self._microbatching = microbatching
        self._timeout_s, self._sync_timeout_s = timeout_s, sync_timeout_s
        self._saves_behind = saves_behind
        self._with_metadata = with_metadata
        self._step = 0

    @property
    def step(self) -> int:
        """The policy's optimizer steps so far, those skipped for a gradient that was not finite included."""
        return self._step

    async def meet(self, timeout_s: float) -> None:
        """Let the ranks find each other and load the model."""
        url = await self._actors[0].call("listen", timeout_s=timeout_s)
        self._seats = tuple(await self._all("join", url, timeout_s=timeout_s))

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        """Per-token scores of every sample; they stay on the ranks until the batch has been trained."""
        if roles:
            await self._each("score", [(part, tuple(roles)) for part in self._split(batch)])
        return ScoresRef(batch=batch.index, roles=tuple(roles))

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        """``batch.steps`` optimizer steps."""
        if scores.batch != batch.index:
            raise ValueError(f"scores are of batch {scores.batch}, not of batch {batch.index}")
        reports = await self._each("train", [(part,) for part in self._split(batch)])
        steps = reports[self._answering()[0]]
        self._step = int(steps[-1]["train/step"])
        return TrainReport(steps=steps)

    async def logprobs(self, batch: BatchRef) -> tuple[Floats, ...]:
        """[L] float32 array of the policy's log-probabilities per sample, in batch order."""
        parts = self._split(batch)
        arrays = await self._each("logprobs", [(part,) for part in parts])
        by_sample: dict[int, Floats] = {}
        for rank in self._answering():
            by_sample |= dict(zip(parts[rank].samples, arrays[rank], strict=True))
        return tuple(by_sample[i] for i in range(len(by_sample)))

    async def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Send every weight along the plan's wire; the receipt is rank 0's."""
        receipts = await self._all("send", plan, version, timeout_s=self._sync_timeout_s)
        receipt: SyncReceipt = receipts[0]
        return receipt

    async def save(self, path: Path) -> Finish | None:
        """Write the sharded state into the folder; see `protocols.Trainer` for what is returned.

        A rank whose ``save`` returns True is still writing. Its ``written``, a coroutine function, returns bytes that
        the first rank's ``conclude`` then gets from all, in rank order. Neither keeps a rank from training.
        """
        if not any(await self._all("save", path.absolute())):
            return None
        if self._saves_behind:
            return self._written
        await self._written()
        return None

    async def _written(self) -> None:
        written = await self._all("written")
        await self._actors[0].call("conclude", written, timeout_s=self._timeout_s)

    async def load(self, path: Path) -> None:
        """Take up a saved state exactly, also with another number of ranks."""
        self._step = (await self._all("load", path.absolute()))[0]

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder."""
        await self._all("export", path.absolute())

    async def offload(self) -> None:
        """Move everything off the GPU."""
        await self._all("offload")

    async def onload(self) -> None:
        """Undo `offload`."""
        await self._all("onload")

    async def metrics(self) -> Mapping[str, float]:
        """Memory of every rank, and its GPU's load where there is one."""
        return {name: value for part in await self._all("metrics") for name, value in part.items()}

    async def close(self) -> None:
        """Stop the ranks."""
        await asyncio.gather(*(actor.stop() for actor in self._actors))

    def _split(self, batch: BatchRef) -> list[RankBatch]:
        """Every rank's share, in rank order."""
        parts = split(
            batch,
            num_ranks=len(self._answering()),
            microbatching=self._microbatching,
            with_metadata=self._with_metadata,
        )
        return [parts[seat.part] for seat in self._seats]

    def _answering(self) -> list[int]:
        return [rank for rank, seat in enumerate(self._seats) if seat.answers]

    async def _all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return await self._each(method, [args] * len(self._actors), timeout_s=timeout_s)

    async def _each(self, method: str, args: Sequence[tuple[Any, ...]], *, timeout_s: float | None = None) -> list[Any]:
        """Call every rank with its own arguments. When one fails, the others, which wait for it, are not waited for."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        tasks = [
            asyncio.ensure_future(actor.call(method, *own, timeout_s=limit))
            for actor, own in zip(self._actors, args, strict=True)
        ]
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
        errors = {rank: error for rank, task in enumerate(tasks) if task.done() and (error := _error(task))}
        if errors:
            rank = min(errors, key=lambda r: (_blame(errors[r]), r))
            raise self._named(errors[rank], rank)
        return [task.result() for task in tasks]

    def _named(self, error: BaseException, rank: int) -> BaseException:
        """The error, saying whose it is where there are several ranks."""
        if len(self._actors) > 1 and isinstance(error, PlasmidError):
            error.args = (f"trainer rank {rank}: {error}",)
        return error


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _blame(error: BaseException) -> int:
    """Causes before consequences: a rank whose peer is gone fails as well, or waits until its deadline."""
    if isinstance(error, ActorDiedError):
        return 0
    if isinstance(error, DeadlineError):
        return 3
    return 1 if isinstance(error, PlasmidError) else 2
