"""Deadlines for every call to trainer and engine, so that one that hangs ends the run with its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from plasmid.protocols import EngineClient, Finish, PauseMode, RolloutEngine, ScoresRef, SyncPlan, Trainer, TrainReport
from plasmid.types import Role, SyncReceipt
from plasmid.types.batch import BatchRef
from plasmid.utils.waiting import GRACE, deadline


class DeadlineTrainer:
    """Implements `protocols.Trainer` over another one; each call may take `run.train_timeout_s`.

    A weight sync has a deadline as a whole, which `loop.weight_sync` keeps.
    """

    def __init__(self, trainer: Trainer, timeout_s: float) -> None:
        self.inner, self._limit_s = trainer, timeout_s * GRACE

    def _deadline(self, call: str) -> AbstractAsyncContextManager[None]:
        return deadline(self._limit_s, f"trainer.{call} (run.train_timeout_s)")

    @property
    def step(self) -> int:
        return self.inner.step

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        async with self._deadline("score"):
            return await self.inner.score(batch, roles)

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        async with self._deadline("train"):
            return await self.inner.train(batch, scores)

    async def logprobs(self, batch: BatchRef) -> tuple[Any, ...]:
        async with self._deadline("logprobs"):
            return await self.inner.logprobs(batch)

    async def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        return await self.inner.send(plan, version)

    async def save(self, path: Path) -> Finish | None:
        async with self._deadline("save"):
            finish = await self.inner.save(path)
        return None if finish is None else partial(self._finish_save, finish)

    async def _finish_save(self, finish: Finish) -> None:
        async with self._deadline("save"):
            await finish()

    async def load(self, path: Path) -> None:
        async with self._deadline("load"):
            await self.inner.load(path)

    async def export(self, path: Path) -> None:
        async with self._deadline("export"):
            await self.inner.export(path)

    async def offload(self) -> None:
        async with self._deadline("offload"):
            await self.inner.offload()

    async def onload(self) -> None:
        async with self._deadline("onload"):
            await self.inner.onload()

    async def metrics(self) -> Mapping[str, float]:
        async with self._deadline("metrics"):
            return await self.inner.metrics()

    async def close(self) -> None:
        await self.inner.close()


class DeadlineEngine:
    """Implements `protocols.RolloutEngine` over another one; each call may take `run.sync_timeout_s`.

    Requests of rollouts have deadlines of their own, and so has a weight sync.
    """

    def __init__(self, engine: RolloutEngine, timeout_s: float) -> None:
        self.inner, self._limit_s = engine, timeout_s * GRACE

    def _deadline(self, call: str) -> AbstractAsyncContextManager[None]:
        return deadline(self._limit_s, f"engine.{call} (run.sync_timeout_s)")

    @property
    def client(self) -> EngineClient:
        return self.inner.client

    @property
    def pause_mode(self) -> PauseMode:
        return self.inner.pause_mode

    def needs_weights(self) -> bool:
        return self.inner.needs_weights()

    async def expect(self, session_ids: Sequence[str]) -> None:
        async with self._deadline("expect"):
            await self.inner.expect(session_ids)

    async def pause(self, mode: PauseMode) -> None:
        async with self._deadline("pause"):
            await self.inner.pause(mode)

    async def resume(self) -> None:
        async with self._deadline("resume"):
            await self.inner.resume()

    async def plan_sync(self) -> SyncPlan:
        return await self.inner.plan_sync()

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        return await self.inner.receive(plan, version)

    async def checksum(self) -> Mapping[str, int]:
        return await self.inner.checksum()

    async def sleep(self, *, keep_weights: bool = True) -> None:
        async with self._deadline("sleep"):
            await self.inner.sleep(keep_weights=keep_weights)

    async def wake(self, *, kv_cache: bool = True) -> None:
        async with self._deadline("wake"):
            await self.inner.wake(kv_cache=kv_cache)

    async def health(self) -> None:
        await self.inner.health()

    async def metrics(self) -> Mapping[str, float]:
        async with self._deadline("metrics"):
            return await self.inner.metrics()

    async def close(self) -> None:
        await self.inner.close()
