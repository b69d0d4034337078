"""Writes checkpoints: all of a run's state at one moment. The trainer may write its part of it while it trains on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plasmid.components import Component
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError
from plasmid.protocols import Finish, Trainer

from ..observe.dispatch import ObserverQueues
from ..rollout.component_states import has_states
from ..rollout.producers.producer import Producer
from ..rollout.worker_pool import WorkerPool
from .folder import CheckpointFolder, Progress, RunState
from .run_folder import RunFolder

log = logging.getLogger(__name__)
BUFFER = "buffer.parquet"
TRAINER = "trainer"
"""Folder of a checkpoint with the trainer's state."""
WORKER_STATES = "workers"
"""Folder of a checkpoint with what the components of each worker process remember."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A checkpoint that lacks at most what the trainer is still writing."""

    temporary: Path
    state: RunState
    started: float
    finish: Finish | None
    """Waits for the trainer; None if it has written everything."""


@dataclass(slots=True, kw_only=True, eq=False)
class CheckpointSaver:
    """Writes checkpoints. At most one checkpoint is under way; it is committed once all of it is written."""

    config: RunConfig
    trainer: Trainer | None
    workers: WorkerPool | None
    producer: Producer
    folder: RunFolder
    queues: ObserverQueues
    pending_evaluations: Callable[[], Sequence[Sequence[Any]]] = tuple
    """Name and batch of evaluations that have begun and not ended."""
    _under_way: asyncio.Task[None] | None = field(init=False, default=None)
    _seconds: dict[str, float] = field(init=False, default_factory=dict)

    @property
    def _stateful_workers(self) -> WorkerPool | None:
        """The processes whose components may remember something; None if none does."""
        return self.workers if has_states(self.config) else None

    async def settle(self) -> None:
        """On-policy, a run that is stopped while it samples is saved as it was before: so are its components."""
        if self._under_way is not None and self._under_way.done():
            await self.finish()
        if self._stateful_workers is not None and self.config.run.max_staleness == 0:
            await self._stateful_workers.mark()

    async def save(self, progress: Progress) -> None:
        """One atomic checkpoint of everything as it is now. Raises `CheckpointError`; what was saved before stays."""
        asked, batch = time.monotonic(), progress.batch
        await self.finish()
        if self._checkpoints.of(batch) in self._checkpoints.all():
            return  # of the same policy: after a resume, or right after a save, nothing was trained
        begun = await self._begin(progress)
        if begun.finish is None:
            await self._complete(begun)
        else:
            log.info("batch %d: the trainer writes its checkpoint while the run goes on", batch)
            self.queues.emit("checkpoint_begun", step=batch)
            self._under_way = asyncio.create_task(self._complete(begun))
        self._seconds["perf/save_blocked_s"] = time.monotonic() - asked

    async def finish(self) -> None:
        """Wait for the checkpoint that is under way, if there is one. Raises what it failed with, once."""
        task, self._under_way = self._under_way, None
        if task is not None:
            await task

    async def finish_after(self, error: Exception) -> None:
        """The same in a run that ends with an error, which is not to be hidden by another one."""
        try:
            await self.finish()
        except Exception as other:  # noqa: BLE001 - boundary: why the run ends must be told, whatever else goes wrong
            log.error("%s (while the run was ending with: %s)", other, error)

    async def close(self) -> None:
        """Give up what is under way: it never becomes a checkpoint."""
        task, self._under_way = self._under_way, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def metrics(self) -> Mapping[str, float]:
        """Seconds of what was saved since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @property
    def _checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.folder.checkpoints, self.config.checkpoint)

    async def _begin(self, progress: Progress) -> _Begun:
        """Write everything that may change from now on, and have the trainer begin."""
        started, batch, finish = time.monotonic(), progress.batch, None
        state, finished = self._state(progress), self.producer.finished()  # at one moment: rollouts go on meanwhile
        with self._explained(batch):
            temporary = self._checkpoints.begin(batch)
            if self.trainer is not None:
                finish = await self.trainer.save(temporary / TRAINER)
            if self.workers is not None and finished:
                await self.workers.write(temporary / BUFFER, finished, batch)
            if self._stateful_workers is not None:
                if self.config.run.max_staleness > 0:  # rollouts go on: a save holds what is remembered now
                    await self._stateful_workers.mark()
                await self._stateful_workers.save(temporary / WORKER_STATES)
        return _Begun(temporary=temporary, state=state, started=started, finish=finish)

    async def _complete(self, begun: _Begun) -> None:
        """Wait for the trainer's files and make a checkpoint of it all."""
        with self._explained(begun.state.batch):
            if begun.finish is not None:
                await begun.finish()
            path = self._checkpoints.commit(begun.temporary, begun.state)
        seconds = time.monotonic() - begun.started
        self._seconds["perf/save_s"] = seconds
        log.info("batch %d: saved %s in %.1f s", begun.state.batch, path, seconds)
        self.queues.emit("checkpoint_saved", step=begun.state.batch, path=path, seconds=seconds)

    @contextmanager
    def _explained(self, batch: int) -> Iterator[None]:
        """Say what became of the checkpoint if it cannot be written, and of the ones before."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            self._checkpoints.discard()
            reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
            kept = self._checkpoints.all()
            rest = f"{kept[-1]} is intact; make room and continue with --resume" if kept else "nothing was saved before"
            raise CheckpointError(f"{self.folder.checkpoints}: cannot save batch {batch}: {reason}; {rest}") from error

    def _state(self, progress: Progress) -> RunState:
        state = RunState(
            batch=progress.batch,
            version=progress.version,
            producer=self.producer.state(),
            components={
                place: dict(state) for place, c in stateful_components(self.config).items() if (state := c.state())
            },
            config=self.config.model_dump(mode="json"),
            evaluations=self.pending_evaluations(),
        )
        return state.copy()  # components may go on changing what they gave


def stateful_components(config: RunConfig) -> dict[str, Component]:
    """Components whose state a checkpoint holds, by a name that does not depend on their order in the recipe."""
    found: dict[str, Component] = {"buffer": config.buffer}
    for tracker in config.trackers:
        name, number = f"trackers/{type(tracker).model_fields['kind'].default}", 1
        while (numbered := name if number == 1 else f"{name}-{number}") in found:
            number += 1
        found[numbered] = tracker
    return found
