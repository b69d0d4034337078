"""The training loop. It only depends on the interfaces in `protocols`.

    sample              score               train               publish             save
    producer.take ----> trainer.score ----> trainer.train ----> sync.publish -----> saver.save
    scored groups       reference,          optimizer steps     weights to the      between two
    of samples          critic, teacher                         engine, version+1   publishes
         ^                                                           |
         +------------- rollout workers <----- engine <--------------+

The policy version counts publishes; a batch may be trained in several optimizer steps; staleness is measured in
versions. Evaluation sets are run between batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from plasmid.config.run import RunConfig
from plasmid.errors import DataError
from plasmid.protocols import RolloutEngine, ScoresRef, Trainer
from plasmid.types.batch import BatchRef, GroupRef

from ..checkpoint.folder import Progress
from ..checkpoint.saver import CheckpointSaver
from ..evaluation.evaluator import Evaluator
from ..observe.metrics import step_metrics
from ..observe.recorder import MetricsRecorder
from ..planning.utilization import TrainUtilization
from ..rollout.producers.producer import ProducedGroups, Producer
from .batch_metrics import (
    batch_rollout_metrics,
    check_failures,
    timing_metrics,
    warn_of_mismatch,
    warn_of_skipped_steps,
)
from .policy_sync import PolicySync
from .requests import LoopRequests

log = logging.getLogger(__name__)
LEFT_OUT = "left-out"
"""Drop reason of groups that passed the filters but were not passed to `Loop.score`."""


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """A batch in the loop."""

    taken: ProducedGroups
    """The groups of the batch, and those dropped since the previous batch."""
    slots: int
    """Number of groups taken from the producer."""
    ref: BatchRef
    will_publish: bool
    """Whether `Loop.publish` follows the training of this batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    scores: ScoresRef | None = None
    """Scores; None before `Loop.score`, and without a trainer."""


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """The loop of one run. `stop` makes `run` save everything and return after the current batch."""

    config: RunConfig
    trainer: Trainer | None
    """None if the run only samples."""
    engine: RolloutEngine | None
    """None if groups come from an earlier run or from demonstrations."""
    producer: Producer
    sync: PolicySync | None
    """None without a trainer or an engine."""
    evaluator: Evaluator | None
    """None if the run cannot sample."""
    saver: CheckpointSaver
    recorder: MetricsRecorder
    write_samples: Callable[[tuple[GroupRef, ...], int, str], Awaitable[None]]
    """Stores groups under a step and a name: ``batch``, or ``end`` for groups dropped after the last batch."""
    apply_hooks: Callable[[int, tuple[GroupRef, ...]], tuple[GroupRef, ...]]
    """Lets plugins change a batch, named by its number from 1, before it is trained on."""
    export: Callable[[int], Awaitable[None]]
    """Exports the trainer's policy after this many batches."""
    progress: Progress
    utilization: TrainUtilization | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    has_sampled: bool = False
    """Whether a batch has been sampled since the run was started or resumed."""
    requests: LoopRequests = field(default_factory=LoopRequests)
    seconds: dict[str, float] = field(default_factory=dict)
    """Durations of the current batch by phase, in seconds."""
    batch_start: float = 0.0
    """Start time of the current batch."""
    taken: ProducedGroups | None = None
    """Groups from the producer that have not been trained on, before `apply_hooks`; None without any."""

    async def run(self) -> bool:
        """Train until the configured number of batches, the end of the data, or `stop`. Returns True if stopped.

        Completes a checkpoint in progress in any case, unless the run is cancelled.
        """
        try:
            await self._run()
        except Exception as error:
            await self.saver.finish_after(error)
            raise
        return self._is_cut_short()

    async def _run(self) -> None:
        await self.start()
        while self.progress.batch < self.config.run.batches and await self._handle_requests() and await self._step():
            pass
        await self.finish()

    async def start(self) -> None:
        """Publish the current weights, and run the evaluations that are due before the next batch."""
        if self.sync is not None:
            await self.sync.start()
        if self.evaluator is not None:
            self.evaluator.wait = self.wait
            await self.evaluator.resume_pending(self._send)
        if self.progress.batch == 0:
            await self._evaluate()
        await self.saver.settle()

    async def _handle_requests(self) -> bool:
        """Write a requested checkpoint, and wait while the run is paused. Returns False if the run is stopping."""
        requests = self.requests
        while not self._may_stop():
            requests.changed.clear()
            if requests.wants_checkpoint and self.progress.unpublished == 0:
                requests.wants_checkpoint = False
                await self._save_now()
            elif self.stopping.is_set() or not requests.is_paused:
                return True
            else:
                requests.is_waiting = True
                self._begin_phase("paused")
                waits = {asyncio.ensure_future(event.wait()) for event in (requests.changed, self.stopping)}
                try:
                    await self.wait(set(waits))
                finally:
                    requests.is_waiting = False
                    for task in waits:
                        task.cancel()
        return False

    async def _step(self) -> bool:
        """Sample, score, train, publish and save one batch. Returns False at the end of the data or if stopped.

        The batch is freed on return, so that none of its tokens stay in memory while the next one is sampled.
        """
        taken = await self.sample()
        if taken is None:
            return False
        batch = await self.score(taken, taken.groups)
        await self.train(batch)
        if batch.will_publish:
            await self.publish(batch)
        await self.end_batch(batch)
        return True

    async def sample(self) -> ProducedGroups | None:
        """Return scored and filtered groups for the next batch; None at the end of the data or if stopped."""
        taken = await self._sample()
        if taken is None:
            return None
        if not taken.groups:
            await self._end_of_data(taken)
            return None
        check_failures(taken, limit=self.config.run.max_failed)
        self.has_sampled = True
        return replace(taken, groups=self.apply_hooks(self.progress.batch + 1, taken.groups))

    async def _sample(self) -> ProducedGroups | None:
        """Return groups for the next batch; None if the run is stopped."""
        self._begin_phase("sample")
        self.seconds, self.batch_start = {}, time.monotonic()
        count = self.config.run.prompts_per_batch
        take = asyncio.ensure_future(self.producer.take(count, version=self.progress.version))
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            if self.progress.unpublished:
                await self.wait({take})
            await self.wait({take, stop})
            if not take.done():
                return None
            self.seconds["sample"] = time.monotonic() - self.batch_start
            self.taken = take.result() if take.result().groups else None
            return take.result()
        finally:
            stop.cancel()
            if not take.done():
                take.cancel()
                await asyncio.gather(take, return_exceptions=True)

    async def wait(self, work: set[asyncio.Future[Any]]) -> None:
        """Wait for the first of ``work``; meanwhile, send weights to restarted servers. The trainer must be idle."""
        if self.sync is not None:
            await self.sync.wait(work)
        else:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)

    async def _rollout_metrics(self, taken: ProducedGroups) -> dict[str, float]:
        """Compute metrics of the rollouts, and add the engine's own metrics."""
        metrics = batch_rollout_metrics(
            taken,
            version=self.progress.version,
            run=self.config.run,
            scored=bool(self.config.rewards),
            published=self.sync is not None,
        )
        if self.engine is not None:
            metrics |= await self.engine.metrics()
        return metrics

    async def score(self, taken: ProducedGroups, groups: tuple[GroupRef, ...]) -> Batch:
        """Create a batch from all or some groups of ``taken``, and compute the required log-probabilities and values.

        A colocated engine is paused until the weights are published or, if they are not, until the batch is trained.
        """
        slots, chosen = len(taken.groups), {group.id for group in groups}
        left_out = [replace(group, dropped_by=LEFT_OUT) for group in taken.groups if group.id not in chosen]
        taken = replace(taken, groups=groups, dropped=(*taken.dropped, *left_out))
        steps = min(self.config.run.steps_per_batch, _num_rollouts(groups))
        version = self.progress.version
        if self.sync is None:  # a replay: use the version of the original run
            version = self.progress.batch // self.config.run.sync_every
        ref = BatchRef(index=self.progress.batch, groups=groups, steps=steps, policy_version=version)
        due = self.sync is None or self.sync.is_due(self.progress.batch + 1)
        batch = Batch(taken=taken, slots=slots, ref=ref, will_publish=due, metrics=await self._rollout_metrics(taken))
        if self.trainer is None:
            return batch
        if self.sync is not None:
            batch.metrics |= await self.sync.enter_training(will_publish=due)
        self._begin_phase("score")
        with self._record_time("score"):
            batch.scores = await self.trainer.score(ref, self.config.algorithm.roles(steps=steps))
        batch.metrics |= batch.scores.metrics
        return batch

    async def train(self, batch: Batch) -> None:
        """Take the optimizer steps for a scored batch."""
        if self.trainer is not None and batch.scores is not None:
            self._begin_phase("train")
            with self._record_time("train"):
                report = await self.trainer.train(batch.ref, batch.scores)
            batch.metrics |= step_metrics(report.steps)
            batch.metrics |= {"train/step": float(self.trainer.step), **await self.trainer.metrics()}
            if self.sync is not None and not batch.will_publish:
                await self.sync.devices.enter_sampling()
        self.progress.batch += 1
        self.progress.unpublished += batch.slots
        self.taken = None

    async def give_back(self, batch: Batch | None) -> None:
        """Return groups that are not trained on to the producer, so that the last checkpoint includes them.

        ``batch`` is the batch of these groups if they have been scored.
        """
        if self.sync is not None:
            await self.sync.leave_training(will_publish=None if batch is None else batch.will_publish)
        else:
            self.producer.release(self.progress.unpublished, version=self.progress.version)
            self.progress.unpublished = 0
        if self.taken is not None:
            self.producer.put_back(self.taken)

    async def publish(self, batch: Batch) -> None:
        """Send the weights of the trained groups to the engine, and release the groups' slots."""
        if self.sync is None:
            self.producer.release(self.progress.unpublished, version=self.progress.version)
            self.progress.unpublished = 0
            return
        if not batch.will_publish:  # publishing earlier than due: the engine may be sampling
            batch.metrics |= await self.sync.enter_training(will_publish=True)
        batch.metrics |= await self.sync.publish()

    async def end_batch(self, batch: Batch) -> None:
        """Store samples and metrics, and run the evaluations and the checkpoint that are due."""
        await self._record(batch)
        await self._evaluate()
        await self._save_if_due()

    async def _record(self, batch: Batch) -> None:
        """Store samples and metrics of the batch, and notify observers."""
        number, taken, metrics = self.progress.batch, batch.taken, batch.metrics
        await self.write_samples((*taken.groups, *taken.dropped), number, "batch")
        self.seconds |= {} if self.sync is None else self.sync.devices.take_seconds()
        metrics |= timing_metrics(self.seconds, time.monotonic() - self.batch_start, batch.ref.groups)
        if self.utilization is not None:
            metrics |= self.utilization.metrics(batch.ref.groups, self.seconds.get("train"))
        metrics |= self.saver.metrics()
        metrics["version"] = float(self.progress.version)
        warn_of_mismatch(metrics, batch=number, limit=self.config.run.warn_mismatch)
        warn_of_skipped_steps(metrics, batch=number)
        self.recorder.emit("batch_finished", batch=number, metrics=metrics)

    async def _evaluate(self, *, last: bool = False) -> None:
        if self.config.eval and self.evaluator is not None:
            self._begin_phase("evaluate")
            last = last or self.progress.batch >= self.config.run.batches
            await self.evaluator.run_due(self.progress.batch, last=last, send=self._send)

    async def _send(self, engine: RolloutEngine) -> None:
        """Send the current version to an evaluation engine. Trainer and rollout engine must both have that version."""
        assert self.sync is not None and self.progress.unpublished == 0
        await self.sync.send_to(engine)

    async def _save_if_due(self) -> None:
        if self.progress.unpublished == 0:
            await self.saver.settle()
        step, every = self.progress.batch, self.config.checkpoint.every
        if every and step % every == 0 and step < self.config.run.batches:
            await self._save_now()
        every = self.config.checkpoint.export_every
        if every and step % every == 0 and self.trainer is not None:
            self._begin_phase("export")
            async with self.trainer_loaded():
                await self.export(step)

    async def _save_now(self) -> None:
        """Write a checkpoint between two batches."""
        await self._save()
        if self.sync is not None and self.config.placement.offload_trainer:
            await self.sync.ask_canary()  # the engine was stopped for the checkpoint and has its memory back

    async def _save(self) -> None:
        if self.evaluator is not None:
            await self.evaluator.before_save(self.progress.batch)
        self._begin_phase("save")
        async with self.trainer_loaded():
            await self.saver.save(self.progress)

    def trainer_loaded(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which the trainer's model and optimizer are on the device, to save or export."""
        return nullcontext() if self.sync is None else self.sync.devices.trainer_loaded()

    async def _end_of_data(self, taken: ProducedGroups) -> None:
        """Handle data that ends before the last batch: the current policy is the final one."""
        if self.progress.batch == 0:
            why = ", ".join(sorted({group.dropped_by for group in taken.dropped})) or "there are no prompts"
            raise DataError(f"data: ended before the first batch: {why}; add prompts or loosen the filters")
        if self.progress.batch < self.config.run.batches:
            log.warning(
                "the data ended after %d of %d planned batches; learning-rate schedules are incomplete",
                self.progress.batch,
                self.config.run.batches,
            )
        if self.progress.unpublished and self.sync is not None:
            # the engine was sampling groups that do not fill a batch
            await self.sync.enter_training(will_publish=True)
            await self.sync.publish()
        if taken.dropped:
            await self.write_samples(taken.dropped, self.progress.batch, "end")
        await self._evaluate(last=True)

    async def finish(self) -> None:
        """Complete evaluations and write the last checkpoint."""
        if self.evaluator is not None and self.evaluator.list_pending() and not self._is_cut_short():
            self._begin_phase("evaluate")
            await self.evaluator.finish()
        if self.sync is not None:
            await self.sync.close()
        if self.trainer is not None and (self.stopping.is_set() or self.config.checkpoint.at_end):
            await self._save()
        await self.saver.finish()

    def stop(self) -> bool:
        """Request a clean end of the run. Returns False if no batch has been sampled yet: there is nothing to save."""
        self.stopping.set()
        return self.has_sampled

    def _may_stop(self) -> bool:
        """Return True if a stop is requested and possible: trainer and engine must be at the same version."""
        return self.stopping.is_set() and self.progress.unpublished == 0

    def _is_cut_short(self) -> bool:
        """Return True if the run was stopped before its last batch."""
        return self.stopping.is_set() and self.progress.batch < self.config.run.batches

    @contextmanager
    def _record_time(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[phase] = time.monotonic() - started

    def _begin_phase(self, phase: str) -> None:
        self.recorder.begin_phase(phase, self.progress.batch, self.progress.version)


def _num_rollouts(groups: tuple[GroupRef, ...]) -> int:
    return len({id_ for group in groups for id_ in group.rollout_ids})
