"""Write checkpoints: a consistent snapshot of a run. The trainer may write its part while training continues."""

from __future__ import annotations

import asyncio
import logging
import math
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
from plasmid.utils.waiting import run_in_thread, wait_within
from plasmid_models.folder import open_weights

from ..observe.dispatch import ObserverQueues
from ..rollout.component_states import copy_state, has_states
from ..rollout.producers.producer import Producer
from ..rollout.worker_pool import WorkerPool
from .folder import CheckpointFolder, Progress, RunState
from .run_files import RunFiles
from .run_folder import RunFolder

log = logging.getLogger(__name__)
LANGUAGE_HEAD = "lm_head.weight"
"""Tensor of model folders that a critic, which has a value head, does not have."""
BUFFER = "buffer.parquet"
IN_FLIGHT = "in_flight.parquet"
"""File of a checkpoint with the tokens of unfinished rollouts."""
TRAINER = "trainer"
"""Folder of a checkpoint with the trainer's state."""
WORKER_STATES = "workers"
"""Folder of a checkpoint with the component states of each worker process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingCheckpoint:
    """A checkpoint that is complete except for files that the trainer is still writing."""

    temporary: Path
    state: RunState
    started: float
    finish: Finish | None
    """Waits until the trainer has written its files; None if it has."""


@dataclass(slots=True, kw_only=True, eq=False)
class CheckpointSaver:
    """Writes checkpoints, at most one at a time, and commits each one when it is complete."""

    config: RunConfig
    trainer: Trainer | None
    workers: WorkerPool | None
    producer: Producer
    folder: RunFolder
    queues: ObserverQueues
    pending_evaluations: Callable[[], Sequence[Sequence[Any]]] = tuple
    """Returns name and batch of the running evaluations."""
    _under_way: asyncio.Task[None] | None = field(init=False, default=None)
    _seconds: dict[str, float] = field(init=False, default_factory=dict)
    _files: RunFiles = field(init=False)

    def __post_init__(self) -> None:
        self._files = RunFiles(self.folder)

    @property
    def _stateful_workers(self) -> WorkerPool | None:
        """Worker processes with stateful components; None if there are no such components."""
        return self.workers if has_states(self.config) else None

    async def settle(self) -> None:
        """Commit a finished checkpoint, and mark the components' states before an on-policy batch is sampled.

        A run that is stopped while it samples is saved with the marked states.
        """
        if self._under_way is not None and self._under_way.done():
            await self.finish()
        if self._stateful_workers is not None and self.config.run.max_staleness == 0:
            await self._stateful_workers.mark()

    async def save(self, progress: Progress) -> None:
        """Write an atomic checkpoint of the current state. Raises `CheckpointError`; earlier checkpoints remain."""
        began, batch = time.monotonic(), progress.batch
        await self.finish()
        if self._checkpoints.of(batch) in self._checkpoints.list_all():
            return  # nothing was trained since the newest checkpoint
        pending = await self._begin(progress)
        if pending.finish is None:
            await self._complete(pending)
        else:
            log.info("batch %d: the trainer writes its checkpoint in the background", batch)
            self.queues.emit("checkpoint_started", batch=batch)
            self._under_way = asyncio.create_task(self._complete(pending))
        self._seconds["perf/save_blocked_s"] = time.monotonic() - began

    async def finish(self) -> None:
        """Wait for the checkpoint in progress, if any. Raises its error once."""
        task, self._under_way = self._under_way, None
        if task is not None:
            await task

    async def finish_after(self, error: Exception) -> None:
        """Like `finish`, in a run that ends with ``error``. Only logs further errors, so that they do not hide it."""
        try:
            await self.finish()
        except Exception as other:  # noqa: BLE001 - boundary: any error here would hide the one that ends the run
            log.error("%s (while the run was ending with: %s)", other, error)

    async def close(self) -> None:
        """Abandon the checkpoint in progress."""
        task, self._under_way = self._under_way, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def metrics(self) -> Mapping[str, float]:
        """Return durations of the saves since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @property
    def _checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.folder.checkpoints, self.config.checkpoint)

    async def _begin(self, progress: Progress) -> _PendingCheckpoint:
        """Write all state that may change from now on, and start the trainer's save."""
        started, batch, finish = time.monotonic(), progress.batch, None
        if self._stateful_workers is not None and self.config.run.max_staleness > 0:
            await self._stateful_workers.mark()  # a streaming producer marks again in its snapshot
        produced, finished = await self.producer.snapshot()
        state = self._state(progress, produced)
        with self._explain_failure(batch):
            temporary = self._checkpoints.begin(batch)
            self._checkpoints.check_space(self._least_bytes())
            self._files.copy_journals(temporary)  # consistent with the state above
            unfinished = [self.folder.samples_of(f"eval-{name}", step).name for name, step in state.evaluations]
            await asyncio.to_thread(self._files.list_samples, temporary, unfinished=unfinished)
            if self.trainer is not None:
                finish = await self.trainer.save(temporary / TRAINER)
            if self.workers is not None and finished:
                await self.workers.write(temporary / BUFFER, finished, batch)
            if self.workers is not None:
                await self.workers.write_turns(temporary / IN_FLIGHT)
            if self._stateful_workers is not None:
                await self._stateful_workers.save(temporary / WORKER_STATES)
        return _PendingCheckpoint(temporary=temporary, state=state, started=started, finish=finish)

    async def _complete(self, pending: _PendingCheckpoint) -> None:
        """Wait for the trainer's files and commit the checkpoint."""
        with self._explain_failure(pending.state.batch):
            if pending.finish is not None:
                await pending.finish()
            commit = run_in_thread(self._checkpoints.commit, pending.temporary, pending.state, name="checkpoint")
            path = await wait_within(self.config.run.train_timeout_s, "checkpoint.commit (run.train_timeout_s)", commit)
        seconds = time.monotonic() - pending.started
        self._seconds["perf/save_s"] = seconds
        log.info("batch %d: saved %s in %.1f s", pending.state.batch, path, seconds)
        self.queues.emit("checkpoint_saved", batch=pending.state.batch, path=path, seconds=seconds)

    @contextmanager
    def _explain_failure(self, batch: int) -> Iterator[None]:
        """Convert errors into a `CheckpointError` that names the newest intact checkpoint."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            self._checkpoints.discard()
            reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
            kept = self._checkpoints.list_all()
            rest = (
                f"{kept[-1]} is intact; free some space and continue with --resume"
                if kept
                else "nothing was saved before"
            )
            raise CheckpointError(f"{self.folder.checkpoints}: cannot save batch {batch}: {reason}; {rest}") from error

    def _least_bytes(self) -> int:
        """Minimum size of a checkpoint with the model's weights; an adapter is far smaller and counts as 0."""
        if self.trainer is None or self.config.trainer.adapter() is not None:
            return 0
        model = self.config.model.path
        per_weight = self.config.trainer.saved_bytes_per_weight(optimizer=self.config.checkpoint.optimizer)
        least = _saved_bytes(Path(model), per_weight)
        if self.config.algorithm.needs().critic:
            critic = self.config.critic.path
            least += _saved_bytes(Path(model if critic == "auto" else critic), per_weight, without=LANGUAGE_HEAD)
        return least

    def _state(self, progress: Progress, produced: Mapping[str, Any]) -> RunState:
        state = RunState(
            batch=progress.batch,
            version=progress.version,
            producer=produced,
            components={
                place: state
                for place, component in list_stateful_components(self.config).items()
                if (state := copy_state(place, component.state()))
            },
            config=self.config.model_dump(mode="json"),
            evaluations=self.pending_evaluations(),
        )
        return state.copy()  # components may change the objects that they returned


def _saved_bytes(model: Path, per_weight: int, *, without: str = "") -> int:
    """Return the minimum size of a model in a checkpoint, in bytes, excluding the tensor ``without``."""
    in_model = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    if not in_model or not per_weight:
        return in_model
    with open_weights("model", model, framework="numpy") as tensors:
        weights: int = sum(math.prod(t.get_shape()) for name, t in tensors.items() if name != without)
    return per_weight * weights


def list_stateful_components(config: RunConfig) -> dict[str, Component]:
    """Return the components with state in checkpoints, by names that do not depend on their order in the recipe."""
    found: dict[str, Component] = {"buffer": config.buffer}
    for tracker in config.trackers:
        name, number = f"trackers/{type(tracker).model_fields['kind'].default}", 1
        while (numbered := name if number == 1 else f"{name}-{number}") in found:
            number += 1
        found[numbered] = tracker
    return found
