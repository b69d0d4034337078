"""Deadlines for calls to trainer and engine, so that a hanging call ends the run with an error that names it.

Weight syncs have a single deadline for both sides, which `loop.device_scheduler` enforces. `close` has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from plasmid.config.loop import LoopConfig
from plasmid.protocols import EngineClient, Finish, PauseMode, RolloutEngine, ScoresRef, SyncPlan, Trainer, TrainReport
from plasmid.types import Role, SyncReceipt
from plasmid.types.batch import BatchRef
from plasmid.utils.waiting import GRACE

from ..loop.call_limits import CallLimits

T = TypeVar("T")


class _Deadlines:
    """Limits the duration of calls to the trainer or the engine."""

    def __init__(self, name: str, setting: str, limit_s: float, limits: CallLimits) -> None:
        self._name, self._setting, self._limit_s, self._limits = name, setting, limit_s * GRACE, limits

    async def _limit(self, method: str, call: Awaitable[T]) -> T:
        name = f"{self._name}.{method}"
        async with self._limits.deadline(name, self._limit_s, f"{name} ({self._setting})"):
            return await call


class DeadlineTrainer(_Deadlines):
    """Wraps a `protocols.Trainer`, and limits each call to `run.train_timeout_s`."""

    def __init__(self, trainer: Trainer, run: LoopConfig, limits: CallLimits) -> None:
        super().__init__("trainer", "run.train_timeout_s", run.train_timeout_s, limits)
        self.inner = trainer

    @property
    def step(self) -> int:
        return self.inner.step

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        return await self._limit("score", self.inner.score(batch, roles))

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        return await self._limit("train", self.inner.train(batch, scores))

    async def logprobs(self, batch: BatchRef) -> tuple[Any, ...]:
        return await self._limit("logprobs", self.inner.logprobs(batch))

    async def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        return await self.inner.send(plan, version)

    async def save(self, path: Path) -> Finish | None:
        finish = await self._limit("save", self.inner.save(path))
        return None if finish is None else lambda: self._limit("save", finish())

    async def load(self, path: Path) -> None:
        await self._limit("load", self.inner.load(path))

    async def export(self, path: Path) -> None:
        await self._limit("export", self.inner.export(path))

    async def offload(self) -> None:
        await self._limit("offload", self.inner.offload())

    async def onload(self) -> None:
        await self._limit("onload", self.inner.onload())

    async def metrics(self) -> Mapping[str, float]:
        return await self._limit("metrics", self.inner.metrics())

    async def close(self) -> None:
        await self.inner.close()


class DeadlineEngine(_Deadlines):
    """Wraps a `protocols.RolloutEngine`, and limits each call to `run.sync_timeout_s`.

    `WorkerPool` limits the requests of rollouts.
    """

    def __init__(self, engine: RolloutEngine, run: LoopConfig, limits: CallLimits) -> None:
        super().__init__("engine", "run.sync_timeout_s", run.sync_timeout_s, limits)
        self.inner = engine

    @property
    def client(self) -> EngineClient:
        return self.inner.client

    @property
    def pause_mode(self) -> PauseMode:
        return self.inner.pause_mode

    def needs_weights(self) -> bool:
        return self.inner.needs_weights()

    async def expect(self, session_ids: Sequence[str]) -> None:
        await self._limit("expect", self.inner.expect(session_ids))

    async def pause(self, mode: PauseMode) -> None:
        await self._limit("pause", self.inner.pause(mode))

    async def resume(self) -> None:
        await self._limit("resume", self.inner.resume())

    async def plan_sync(self) -> SyncPlan:
        return await self.inner.plan_sync()

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        return await self.inner.receive(plan, version)

    async def checksum(self) -> Mapping[str, int]:
        return await self.inner.checksum()

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await self._limit("sleep", self.inner.sleep(keep_weights=keep_weights))

    async def wake(self, *, kv_cache: bool = True) -> None:
        await self._limit("wake", self.inner.wake(kv_cache=kv_cache))

    async def health(self) -> None:
        await self._limit("health", self.inner.health())

    async def metrics(self) -> Mapping[str, float]:
        return await self._limit("metrics", self.inner.metrics())

    async def close(self) -> None:
        await self.inner.close()
