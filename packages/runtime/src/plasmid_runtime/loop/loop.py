"""The training loop. It knows the Protocols and nothing behind them.

Take groups, train on them, publish the weights, release the groups' slots; evaluate and save in between. The policy
version counts publishes; a batch may be trained in several optimizer steps; staleness is measured in versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from plasmid.config.run import RunConfig
from plasmid.errors import DataError, EngineError
from plasmid.protocols import RolloutEngine, Trainer
from plasmid.types.batch import BatchRef, GroupRef
from plasmid.utils.waiting import GRACE, within

from ..checkpoint.folder import Progress
from ..checkpoint.saver import CheckpointSaver
from ..evaluation.evaluator import Evaluator
from ..observe.metrics import step_metrics
from ..observe.recorder import MetricsRecorder
from ..rollout.producers.producer import Producer, Taken
from .batch_metrics import batch_rollout_metrics, timing_metrics, warn_of_mismatch
from .canary import Canary
from .device_scheduler import DeviceScheduler
from .weight_sync import wait_mending

log = logging.getLogger(__name__)
T = TypeVar("T")
BEFORE_TRAINED = ("sample", "score", "train")
"""Phases of a batch that is not counted in `Progress.batch` yet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopParts:
    """What the loop calls."""

    trainer: Trainer | None
    """None: roll out only."""
    engine: RolloutEngine | None
    """None: groups come from an earlier run, or from data alone."""
    producer: Producer
    observers: MetricsRecorder
    write_samples: Callable[[tuple[GroupRef, ...], int, str], Awaitable[None]]
    """Store groups under a step and a name: ``batch``, or ``end`` for what was dropped after the last batch."""
    evaluations: Evaluator | None
    """None where nothing can be sampled."""
    saver: CheckpointSaver
    change: Callable[[int, tuple[GroupRef, ...]], tuple[GroupRef, ...]] = lambda batch, groups: groups
    """Lets plugins change a batch, named by its number from 1, before it is trained on."""


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """One run. `stop` makes `run` return after the current batch, with everything saved."""

    config: RunConfig
    parts: LoopParts
    progress: Progress = field(default_factory=Progress)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the present batch, by what it was spent on."""
    begun: float = 0.0
    """When the present batch began."""
    turns: DeviceScheduler | None = field(init=False, default=None)
    """Moves trainer and engine; None unless there are both."""
    canary: Canary | None = field(init=False, default=None)
    """None for engines that need none."""

    def __post_init__(self) -> None:
        trainer, engine = self.parts.trainer, self.parts.engine
        if trainer is not None and engine is not None:
            self.turns = DeviceScheduler(config=self.config, trainer=trainer, engine=engine)
            plan = None if self.config.rollout is None else self.config.rollout.canary()
            if plan is not None:
                ranks, limit_s = self.config.placement.trainer_ranks, self.config.run.sync_timeout_s
                self.canary = Canary(engine, trainer, plan, copies=ranks, limit_s=limit_s)

    async def run(self) -> bool:
        """Train until the configured number of batches, the end of the data, or `stop`. True if it was stopped.

        A checkpoint that is under way is completed in any case, unless the run is cancelled.
        """
        try:
            await self._run()
        except Exception as error:
            await self.parts.saver.finish_after(error)
            raise
        return self._is_cut_short()

    async def _run(self) -> None:
        if self.turns is not None:
            self._tell("sync")
            await self.turns.begin(self.progress.version)
            await self._ask_canary()
        if self.parts.evaluations is not None:
            await self.parts.evaluations.resume_pending(self._send)
        if self.progress.batch == 0:
            await self._evaluate()
        await self.parts.saver.settle()
        while self.progress.batch < self.config.run.batches and not self._may_stop() and await self._next():
            pass
        await self._finish()

    def _is_cut_short(self) -> bool:
        """True if the run was stopped before its last batch."""
        return self.stopping.is_set() and self.progress.batch < self.config.run.batches

    def trainer_at_hand(self) -> AbstractAsyncContextManager[None]:
        """A turn of the trainer's, to save or export what it has."""
        return nullcontext() if self.turns is None else self.turns.trainer_at_hand()

    def stop(self) -> None:
        """Ask for a clean end."""
        self.stopping.set()

    async def _next(self) -> bool:
        """Take and train one batch; False if there is none, or the run is to stop first.

        Nothing of a batch is held here while the next one is sampled: its tokens are freed with the last reference.
        """
        taken = await self._take()
        if taken is None:
            return False
        if not taken.groups:
            await self._end_of_data(taken)
            return False
        await self._batch(taken)
        return True

    def _may_stop(self) -> bool:
        """Only between publishes is the engine's policy the one that a checkpoint holds."""
        return self.stopping.is_set() and self.progress.unpublished == 0

    async def _take(self) -> Taken | None:
        """Groups for the next batch; None if the run is to stop first."""
        self._tell("sample")
        self.seconds, self.begun = {}, time.monotonic()
        count = self.config.run.prompts_per_batch
        take = asyncio.ensure_future(self.parts.producer.take(count, version=self.progress.version))
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            if self.progress.unpublished:
                await self._wait({take})
            await self._wait({take, stop})
            if not take.done():
                return None
            self.seconds["sample"] = time.monotonic() - self.begun
            return take.result()
        finally:
            stop.cancel()
            if not take.done():
                take.cancel()
                await asyncio.gather(take, return_exceptions=True)

    async def _wait(self, work: set[asyncio.Future[Any]]) -> None:
        """Wait for the first of ``work`` and give the engine weights that a part of it lacks."""
        await wait_mending(work, None if self.turns is None else self.parts.engine, self._mend)

    async def _mend(self) -> None:
        if self.progress.unpublished:  # the trainer is ahead of what the engine held
            await self._publish_next()
        elif self.turns is not None:
            await self.turns.mend(self.progress.version)
            await self._ask_canary()

    async def _canary_answered(self) -> None:
        """Wait for an answer while the engine may draw. One that lacks weights by now gets them and is asked anew."""
        while self.canary is not None and self.canary.asked is not None and not self.canary.asked.done():
            await self._wait({self.canary.asked})

    async def _ask_canary(self) -> None:
        """Wait for the answer here only if nothing else may be asked meanwhile."""
        if self.canary is not None:
            self.canary.ask(self.progress.version)
            if self.canary.plan.alone:
                await self._canary_answered()

    async def _batch(self, taken: Taken) -> None:
        self._check_failures(taken)
        taken = replace(taken, groups=self.parts.change(self.progress.batch + 1, taken.groups))
        metrics = await self._measured(taken)
        if self.parts.trainer is not None:
            metrics |= await self._train(self.parts.trainer, taken)
        self.progress.batch += 1
        step = self.progress.batch
        self.progress.unpublished += len(taken.groups)
        if self._publish_is_due():
            metrics |= await self._publish_next()
        elif self.turns is None:
            self._release()
        await self.parts.write_samples(tuple([*taken.groups, *taken.dropped]), step, "batch")
        self.seconds |= {} if self.turns is None else self.turns.spent()
        metrics |= timing_metrics(self.seconds, time.monotonic() - self.begun, taken.groups)
        metrics |= self.parts.saver.metrics()
        metrics["version"] = float(self.progress.version)
        warn_of_mismatch(metrics, batch=step, limit=self.config.run.warn_mismatch)
        self.parts.observers.emit("step_finished", step=step, metrics=metrics)
        await self._evaluate()
        if self.progress.unpublished == 0:
            await self.parts.saver.settle()
        if self.config.checkpoint.every and step % self.config.checkpoint.every == 0 and step < self.config.run.batches:
            await self._save()
            if self.config.placement.offload_trainer:
                await self._ask_canary()  # the engine was stopped for it, and has its memory back

    async def _measured(self, taken: Taken) -> dict[str, float]:
        """Of the rollouts, and what the engine says of itself just after them."""
        metrics = batch_rollout_metrics(
            taken, version=self.progress.version, scored=bool(self.config.rewards), published=self.turns is not None
        )
        if self.parts.engine is not None:
            limit_s = self.config.run.sync_timeout_s * GRACE
            metrics |= await within(limit_s, "engine.metrics (run.sync_timeout_s)", self.parts.engine.metrics())
        return metrics

    async def _train(self, trainer: Trainer, taken: Taken) -> dict[str, float]:
        """Score and train one batch, with the engine out of the way if it shares the GPU."""
        batch = BatchRef(
            index=self.progress.batch, groups=taken.groups, steps=min(self.config.run.steps_per_batch, _rollouts(taken))
        )
        await self._canary_answered()
        if self.turns is not None:
            await self.turns.to_trainer(will_publish=self._publish_is_due(after=1))
        proof = {} if self.canary is None else await self.canary.check()
        roles = self.config.algorithm.roles(steps=batch.steps)
        self._tell("score")
        scores = await self._timed("score", trainer.score(batch, roles))
        self._tell("train")
        report = await self._timed("train", trainer.train(batch, scores))
        gauges = {"train/step": float(trainer.step), **await self._timed("metrics", trainer.metrics())}
        if self.turns is not None and not self._publish_is_due(after=1):
            await self.turns.to_engine()
        return {**proof, **scores.metrics, **step_metrics(report.steps), **gauges}

    def _publish_is_due(self, *, after: int = 0) -> bool:
        done = self.progress.batch + after
        if self.turns is None:
            return False
        return done % self.config.run.sync_every == 0 or done >= self.config.run.batches

    async def _publish_next(self) -> dict[str, float]:
        assert self.turns is not None
        self._tell("sync")
        started = time.monotonic()
        receipt = await self.turns.publish(self.progress.version + 1)
        self.seconds["sync"] = time.monotonic() - started
        self.progress.version += 1
        await self._ask_canary()
        self._release()
        phases = {f"sync/{name}_s": seconds for name, seconds in receipt.phases.items()}
        return {"sync/bytes": float(receipt.num_bytes), "sync/transfer_s": receipt.seconds, **phases}

    def _release(self) -> None:
        self.parts.producer.release(self.progress.unpublished, version=self.progress.version)
        self.progress.unpublished = 0

    async def _evaluate(self, *, last: bool = False) -> None:
        if self.config.eval and self.parts.evaluations is not None:
            self._tell("evaluate")
            last = last or self.progress.batch >= self.config.run.batches
            await self.parts.evaluations.run_due(self.progress.batch, last=last, send=self._send)

    async def _send(self, engine: RolloutEngine) -> None:
        """Give an engine that evaluates what the other one has; only between publishes do both hold one version."""
        assert self.turns is not None and self.progress.unpublished == 0
        await self.turns.send_to(engine, self.progress.version)

    async def _end_of_data(self, taken: Taken) -> None:
        """The data ended before the last batch: the policy trained so far is the final one."""
        if self.progress.batch == 0:
            why = ", ".join(sorted({group.dropped_by for group in taken.dropped})) or "there are no prompts"
            raise DataError(f"data: ended before anything was trained on: {why}; add prompts or loosen the filters")
        if self.progress.batch < self.config.run.batches:
            log.warning(
                "the data ended after %d of %d planned batches; learning-rate schedules have not come to their end",
                self.progress.batch,
                self.config.run.batches,
            )
        if self.progress.unpublished and self.turns is not None:
            await self._publish_next()
        if taken.dropped:
            await self.parts.write_samples(taken.dropped, self.progress.batch, "end")
        await self._evaluate(last=True)

    async def _save(self) -> None:
        if self.parts.evaluations is not None:
            await self.parts.evaluations.before_save(self.progress.batch)
        self._tell("save")
        async with self.trainer_at_hand():
            await self.parts.saver.save(self.progress)

    async def _finish(self) -> None:
        if self.canary is not None:
            await self.canary.close()
        evaluations = self.parts.evaluations
        if evaluations is not None and evaluations.pending() and not self._is_cut_short():
            self._tell("evaluate")
            await evaluations.finish()
        if self.parts.trainer is not None and (self.stopping.is_set() or self.config.checkpoint.at_end):
            await self._save()
        await self.parts.saver.finish()

    def _check_failures(self, taken: Taken) -> None:
        groups = [*taken.new, *taken.dropped]
        failed = [error for group in groups for error in group.errors]
        total = len(failed) + sum(group.num_samples for group in groups)
        if failed and len(failed) / total > self.config.run.max_failed:
            raise EngineError(
                f"rollouts: {len(failed)} of {total} failed, more than run.max_failed = "
                f"{self.config.run.max_failed:g}; the last error was: {failed[-1]}"
            )

    async def _timed(self, name: str, work: Awaitable[T]) -> T:
        """Await an operation of the trainer, with its deadline."""
        started = time.monotonic()
        result = await within(self.config.run.train_timeout_s * GRACE, f"trainer.{name} (run.train_timeout_s)", work)
        self.seconds[name] = time.monotonic() - started
        return result

    def _tell(self, phase: str) -> None:
        batch = self.progress.batch + (phase in BEFORE_TRAINED)
        log.debug("batch %d: %s", batch, phase)
        self.parts.observers.emit("phase_started", batch=batch, phase=phase, version=self.progress.version)


def _rollouts(taken: Taken) -> int:
    return len({id_ for group in taken.groups for id_ in group.rollout_ids})
