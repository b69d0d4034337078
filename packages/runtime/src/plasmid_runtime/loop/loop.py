"""The training loop. It knows the Protocols and nothing behind them.

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
from plasmid.protocols import RolloutEngine, Trainer
from plasmid.types.batch import BatchRef, GroupRef

from ..checkpoint.folder import Progress
from ..checkpoint.saver import CheckpointSaver
from ..evaluation.evaluator import Evaluator
from ..observe.metrics import step_metrics
from ..observe.recorder import MetricsRecorder
from ..rollout.producers.producer import Producer, Taken
from .batch_metrics import batch_rollout_metrics, check_failures, timing_metrics, warn_of_mismatch
from .policy_sync import PolicySync

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """One run. `stop` makes `run` return after the current batch, with everything saved."""

    config: RunConfig
    trainer: Trainer | None
    """None: roll out only."""
    engine: RolloutEngine | None
    """None: groups come from an earlier run, or from data alone."""
    producer: Producer
    sync: PolicySync | None
    """None unless there are both trainer and engine."""
    evaluator: Evaluator | None
    """None where nothing can be sampled."""
    saver: CheckpointSaver
    recorder: MetricsRecorder
    write_samples: Callable[[tuple[GroupRef, ...], int, str], Awaitable[None]]
    """Store groups under a step and a name: ``batch``, or ``end`` for what was dropped after the last batch."""
    apply_hooks: Callable[[int, tuple[GroupRef, ...]], tuple[GroupRef, ...]]
    """Lets plugins change a batch, named by its number from 1, before it is trained on."""
    progress: Progress
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the present batch, by phase."""
    begun: float = 0.0
    """When the present batch began."""

    async def run(self) -> bool:
        """Train until the configured number of batches, the end of the data, or `stop`. True if it was stopped.

        A checkpoint that is under way is completed in any case, unless the run is cancelled.
        """
        try:
            await self._run()
        except Exception as error:
            await self.saver.finish_after(error)
            raise
        return self._is_cut_short()

    async def _run(self) -> None:
        if self.sync is not None:
            await self.sync.start()
        if self.evaluator is not None:
            await self.evaluator.resume_pending(self._send)
        if self.progress.batch == 0:
            await self._evaluate()
        await self.saver.settle()
        while self.progress.batch < self.config.run.batches and not self._may_stop() and await self._step():
            pass
        await self._finish()

    async def _step(self) -> bool:
        """Sample, score, train, publish and save one batch; False if there is none, or the run is to stop first.

        The batch is freed when this returns: no token of it is held while the next one is sampled.
        """
        taken = await self._sample()
        if taken is None:
            return False
        if not taken.groups:
            await self._end_of_data(taken)
            return False
        check_failures(taken, limit=self.config.run.max_failed)
        taken = replace(taken, groups=self.apply_hooks(self.progress.batch + 1, taken.groups))
        metrics = await self._rollout_metrics(taken)
        if self.trainer is not None:
            metrics |= await self._score_and_train(self.trainer, taken)
        self.progress.batch += 1
        self.progress.unpublished += len(taken.groups)
        metrics |= await self._publish_if_due()
        await self._record(taken, metrics)
        await self._evaluate()
        await self._save_if_due()
        return True

    async def _sample(self) -> Taken | None:
        """Groups for the next batch; None if the run is to stop first."""
        self._begin_phase("sample")
        self.seconds, self.begun = {}, time.monotonic()
        count = self.config.run.prompts_per_batch
        take = asyncio.ensure_future(self.producer.take(count, version=self.progress.version))
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
        """Wait for the first of ``work``."""
        if self.sync is not None:
            await self.sync.wait(work)
        else:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)

    async def _rollout_metrics(self, taken: Taken) -> dict[str, float]:
        """Of the rollouts, and what the engine says of itself just after them."""
        metrics = batch_rollout_metrics(
            taken, version=self.progress.version, scored=bool(self.config.rewards), published=self.sync is not None
        )
        if self.engine is not None:
            metrics |= await self.engine.metrics()
        return metrics

    async def _score_and_train(self, trainer: Trainer, taken: Taken) -> dict[str, float]:
        """Score and train one batch, with the engine out of the way if it shares the GPU."""
        steps = min(self.config.run.steps_per_batch, _num_rollouts(taken))
        version = self.progress.version
        if self.sync is None:  # a replay: what it was in the run itself
            version = self.progress.batch // self.config.run.sync_every
        batch = BatchRef(index=self.progress.batch, groups=taken.groups, steps=steps, policy_version=version)
        will_publish = self.sync is not None and self.sync.is_due(self.progress.batch + 1)
        proof = {} if self.sync is None else await self.sync.enter_training(will_publish=will_publish)
        roles = self.config.algorithm.roles(steps=steps)
        self._begin_phase("score")
        with self._timed("score"):
            scores = await trainer.score(batch, roles)
        self._begin_phase("train")
        with self._timed("train"):
            report = await trainer.train(batch, scores)
        gauges = {"train/step": float(trainer.step), **await trainer.metrics()}
        if self.sync is not None and not will_publish:
            await self.sync.enter_sampling()
        return {**proof, **scores.metrics, **step_metrics(report.steps), **gauges}

    async def _publish_if_due(self) -> dict[str, float]:
        """Send the weights of the trained groups to the engine, and release the groups' slots."""
        if self.sync is None:
            self.producer.release(self.progress.unpublished, version=self.progress.version)
            self.progress.unpublished = 0
        elif self.sync.is_due(self.progress.batch):
            return await self.sync.publish()
        return {}

    async def _record(self, taken: Taken, metrics: dict[str, float]) -> None:
        """Store the samples and the metrics of the batch, and tell observers."""
        step = self.progress.batch
        await self.write_samples((*taken.groups, *taken.dropped), step, "batch")
        self.seconds |= {} if self.sync is None else self.sync.take_seconds()
        metrics |= timing_metrics(self.seconds, time.monotonic() - self.begun, taken.groups)
        metrics |= self.saver.metrics()
        metrics["version"] = float(self.progress.version)
        warn_of_mismatch(metrics, batch=step, limit=self.config.run.warn_mismatch)
        self.recorder.emit("step_finished", step=step, metrics=metrics)

    async def _evaluate(self, *, last: bool = False) -> None:
        if self.config.eval and self.evaluator is not None:
            self._begin_phase("evaluate")
            last = last or self.progress.batch >= self.config.run.batches
            await self.evaluator.run_due(self.progress.batch, last=last, send=self._send)

    async def _send(self, engine: RolloutEngine) -> None:
        """Give an engine that evaluates what the other one has; only between publishes do both hold one version."""
        assert self.sync is not None and self.progress.unpublished == 0
        await self.sync.send_to(engine)

    async def _save_if_due(self) -> None:
        if self.progress.unpublished == 0:
            await self.saver.settle()
        step, every = self.progress.batch, self.config.checkpoint.every
        if every and step % every == 0 and step < self.config.run.batches:
            await self._save()
            if self.sync is not None and self.config.placement.offload_trainer:
                await self.sync.ask_canary()  # the engine was stopped for it, and has its memory back

    async def _save(self) -> None:
        if self.evaluator is not None:
            await self.evaluator.before_save(self.progress.batch)
        self._begin_phase("save")
        async with self.trainer_loaded():
            await self.saver.save(self.progress)

    def trainer_loaded(self) -> AbstractAsyncContextManager[None]:
        """A context in which the trainer has its memory, to save or export."""
        return nullcontext() if self.sync is None else self.sync.trainer_loaded()

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
        if self.progress.unpublished and self.sync is not None:
            await self.sync.publish()
        if taken.dropped:
            await self.write_samples(taken.dropped, self.progress.batch, "end")
        await self._evaluate(last=True)

    async def _finish(self) -> None:
        if self.sync is not None:
            await self.sync.close()
        if self.evaluator is not None and self.evaluator.pending() and not self._is_cut_short():
            self._begin_phase("evaluate")
            await self.evaluator.finish()
        if self.trainer is not None and (self.stopping.is_set() or self.config.checkpoint.at_end):
            await self._save()
        await self.saver.finish()

    def stop(self) -> None:
        """Ask for a clean end."""
        self.stopping.set()

    def _may_stop(self) -> bool:
        """Only between publishes is the engine's policy the one that a checkpoint holds."""
        return self.stopping.is_set() and self.progress.unpublished == 0

    def _is_cut_short(self) -> bool:
        """True if the run was stopped before its last batch."""
        return self.stopping.is_set() and self.progress.batch < self.config.run.batches

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[phase] = time.monotonic() - started

    def _begin_phase(self, phase: str) -> None:
        self.recorder.begin_phase(phase, self.progress.batch, self.progress.version)


def _num_rollouts(taken: Taken) -> int:
    return len({id_ for group in taken.groups for id_ in group.rollout_ids})
