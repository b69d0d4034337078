"""The training loop. It knows the Protocols and nothing behind them.

Take groups, train on them, publish the weights, release the groups' slots; evaluate and save in between. The policy
version counts publishes; a batch may be trained in several optimizer steps; staleness is measured in versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..batch import BatchRef, GroupRef
from ..config import RunConfig
from ..errors import EngineError
from ..observe.metrics import rollout_metrics, step_metrics
from ..protocols import RolloutEngine, Trainer
from ..rollout.producer import Producer, Taken
from .publish import publish

log = logging.getLogger(__name__)


class Telling(Protocol):
    """How the loop tells observers what happens."""

    def emit(self, hook: str, **kwargs: Any) -> None:
        """Tell every observer; never blocks."""
        ...


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands. Everything here is in a checkpoint."""

    batch: int = 0
    """Batches trained so far."""
    version: int = 0
    """Policy version that the engine holds: publishes so far."""
    unpublished: int = 0
    """Groups trained on since the last publish."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopParts:
    """What the loop calls."""

    trainer: Trainer | None
    """None: roll out only."""
    engine: RolloutEngine | None
    """None: groups come from an earlier run, or from data alone."""
    producer: Producer
    observers: Telling
    write_samples: Callable[[tuple[GroupRef, ...], int], Awaitable[None]]
    evaluate: Callable[[int, bool], Awaitable[None]]
    """Evaluate the sets that are due after this batch (0: before the first), which may be the last."""
    save: Callable[[Progress], Awaitable[None]]


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """One run. `stop` makes `run` return after the current batch, with everything saved."""

    config: RunConfig
    parts: LoopParts
    progress: Progress = field(default_factory=Progress)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    seconds: dict[str, float] = field(default_factory=dict)

    async def run(self) -> bool:
        """Train until the configured number of batches, the end of the data, or `stop`. True if it was stopped."""
        if self.parts.engine is not None and self.parts.trainer is not None:
            self._tell("sync")
            await self._publish(self.progress.version)
        if self.progress.batch == 0:
            await self._evaluate()
        while self.progress.batch < self.config.run.batches and not self._may_stop():
            taken = await self._take()
            if taken is None:
                break
            if not taken.groups:
                await self._end_of_data()
                break
            await self._batch(taken)
        await self._finish()
        return self.stopping.is_set() and self.progress.batch < self.config.run.batches

    def stop(self) -> None:
        """Ask for a clean end."""
        self.stopping.set()

    def _may_stop(self) -> bool:
        """Only between publishes is the engine's policy the one that a checkpoint holds."""
        return self.stopping.is_set() and self.progress.unpublished == 0

    async def _take(self) -> Taken | None:
        """Groups for the next batch; None if the run is to stop first."""
        self._tell("sample")
        self.seconds = {}
        started = time.monotonic()
        count = self.config.run.prompts_per_batch
        take = asyncio.ensure_future(self.parts.producer.take(count, version=self.progress.version))
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            if self.progress.unpublished:
                await take
            await asyncio.wait({take, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not take.done():
                return None
            self.seconds["sample"] = time.monotonic() - started
            return take.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            stop.cancel()
            if not take.done():
                take.cancel()
                await asyncio.gather(take, return_exceptions=True)

    async def _batch(self, taken: Taken) -> None:
        self._check_failures(taken)
        metrics = self._rollout_metrics(taken)
        if self.parts.trainer is not None:
            metrics |= await self._train(self.parts.trainer, taken)
        self.progress.batch += 1
        step = self.progress.batch
        self.progress.unpublished += len(taken.groups)
        if self._publish_is_due():
            metrics |= await self._publish_next()
        elif self.parts.trainer is None or self.parts.engine is None:
            self._release()
        await self.parts.write_samples(tuple([*taken.groups, *taken.dropped]), step)
        metrics |= self._timings(taken)
        self.parts.observers.emit("step_finished", step=step, metrics=metrics)
        await self._evaluate()
        if self.config.checkpoint.every and step % self.config.checkpoint.every == 0 and step < self.config.run.batches:
            await self._save()

    def _rollout_metrics(self, taken: Taken) -> dict[str, float]:
        """Over all groups, or filters would hide how good the policy is; staleness over trained ones."""
        trained = rollout_metrics(taken.groups, version=self.progress.version)
        everything = rollout_metrics([*taken.groups, *taken.dropped], version=self.progress.version)
        if not self.config.rewards:  # what nobody scored has a reward of 0
            everything = {name: value for name, value in everything.items() if not name.startswith("reward/")}
        return everything | {name: value for name, value in trained.items() if name.startswith("rollout/staleness")}

    async def _train(self, trainer: Trainer, taken: Taken) -> dict[str, float]:
        """Score and train one batch, with the engine out of the way if it shares the GPU."""
        place, engine = self.config.placement, self.parts.engine
        batch = BatchRef(
            index=self.progress.batch, groups=taken.groups, steps=min(self.config.run.steps_per_batch, _rollouts(taken))
        )
        if place.colocated and engine is not None:
            await engine.pause(engine.pause_mode)
            if place.offload_engine:
                await engine.sleep()
        if place.offload_trainer:
            await trainer.onload()
        roles = self.config.algorithm.roles(steps=batch.steps)
        self._tell("score")
        scores = await self._timed("score", trainer.score(batch, roles))
        self._tell("train")
        report = await self._timed("train", trainer.train(batch, scores))
        if place.colocated and engine is not None:
            if place.offload_engine:
                await engine.wake(kv_cache=not self._publish_is_due(after=1))
            if not self._publish_is_due(after=1):
                await self._offload(trainer)
                await engine.resume()
        gauges = {"train/step": float(trainer.step), **await trainer.metrics()}
        return {**scores.metrics, **step_metrics(report.steps), **gauges}

    async def _offload(self, trainer: Trainer) -> None:
        if self.config.placement.offload_trainer:
            await trainer.offload()

    def _publish_is_due(self, *, after: int = 0) -> bool:
        done = self.progress.batch + after
        if self.parts.trainer is None or self.parts.engine is None:
            return False
        return done % self.config.run.sync_every == 0 or done >= self.config.run.batches

    async def _publish_next(self) -> dict[str, float]:
        self._tell("sync")
        num_bytes = await self._timed("sync", self._publish(self.progress.version + 1))
        self.progress.version += 1
        self._release()
        return {"sync/bytes": float(num_bytes)}

    def _release(self) -> None:
        self.parts.producer.release(self.progress.unpublished)
        self.progress.unpublished = 0

    async def _publish(self, version: int) -> int:
        trainer, engine = self.parts.trainer, self.parts.engine
        assert trainer is not None and engine is not None
        receipt = await publish(trainer, engine, version=version, timeout_s=self.config.run.sync_timeout_s)
        if self.config.placement.offload_trainer:
            await trainer.offload()
        if self.config.placement.offload_engine:
            await engine.wake(kv_cache=True)
        return receipt.num_bytes

    async def _evaluate(self, *, last: bool = False) -> None:
        if self.config.eval and self.parts.engine is not None:
            self._tell("evaluate")
            await self.parts.evaluate(self.progress.batch, last or self.progress.batch >= self.config.run.batches)

    async def _end_of_data(self) -> None:
        """The data ended before the last batch: the policy trained so far is the final one."""
        log.info("the data ended after %d batches", self.progress.batch)
        if self.progress.unpublished and self.parts.trainer is not None and self.parts.engine is not None:
            await self._publish_next()
        await self._evaluate(last=True)

    async def _save(self) -> None:
        self._tell("save")
        await self.parts.save(self.progress)

    async def _finish(self) -> None:
        if self.parts.trainer is not None and (self.stopping.is_set() or self.config.checkpoint.at_end):
            await self._save()

    def _check_failures(self, taken: Taken) -> None:
        groups = [*taken.groups, *taken.dropped]
        failed = [error for group in groups for error in group.errors]
        total = len(failed) + sum(group.num_samples for group in groups)
        if failed and len(failed) / total > self.config.run.max_failed:
            raise EngineError(
                f"rollouts: {len(failed)} of {total} failed, more than run.max_failed = "
                f"{self.config.run.max_failed:g}; the last error was: {failed[-1]}"
            )

    def _timings(self, taken: Taken) -> dict[str, float]:
        total = sum(self.seconds.values())
        tokens = float(sum(group.lengths.sum() for group in taken.groups))
        named = {f"perf/{name}_s": seconds for name, seconds in self.seconds.items()}
        rate = {"perf/tokens_per_s": tokens / total} if total > 0 else {}
        return {**named, "perf/batch_s": total, **rate, "version": float(self.progress.version)}

    async def _timed(self, name: str, work: Awaitable[Any]) -> Any:
        started = time.monotonic()
        result = await work
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
        return result

    def _tell(self, phase: str) -> None:
        log.debug("batch %d: %s", self.progress.batch, phase)
        self.parts.observers.emit(
            "phase_started", batch=self.progress.batch, phase=phase, version=self.progress.version
        )


def _rollouts(taken: Taken) -> int:
    return len({id_ for group in taken.groups for id_ in group.rollout_ids})
