"""Move memory and weights between trainer and engine, on separate or shared GPUs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from plasmid.config.run import RunConfig
from plasmid.errors import EngineLostError
from plasmid.protocols import RolloutEngine, Trainer
from plasmid.types import SyncResult
from plasmid.types.receipts import compare
from plasmid.utils.waiting import run_together

from .call_limits import CallLimits


async def transfer(
    trainer: Trainer, engine: RolloutEngine, *, version: int, timeout_s: float, limits: CallLimits
) -> SyncResult:
    """Send and receive one version concurrently and compare both results. The engine must be paused, and remains
    paused.

    Raises `SyncError` if the results differ, `DeadlineError` if the two do not finish in time.
    """
    started = time.monotonic()
    async with limits.deadline("sync", timeout_s, f"weight sync of version {version} (run.sync_timeout_s)"):
        sent, received = await _send_and_receive(trainer, engine, version)
    compare(sent, received)
    phases = {**sent.phases, **received.phases}
    return replace(sent, version=version, seconds=time.monotonic() - started, phases=phases)


async def _send_and_receive(trainer: Trainer, engine: RolloutEngine, version: int) -> list[SyncResult]:
    plan = await engine.plan_sync()
    # concurrently: a broadcast needs both sides, and shared memory must not outlive its tensor
    return await run_together([trainer.send(plan, version), engine.receive(plan, version)])


log = logging.getLogger(__name__)
T = TypeVar("T")
RETRY_S = 1.0
"""Interval between attempts of a weight sync, in seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceScheduler:
    """Moves trainer and engine so that they never need the memory of a shared GPU at the same time.

    A colocated engine generates nothing between `enter_training` and `enter_sampling` or `publish`: it may have no
    memory, and its samples would not be on-policy.
    """

    config: RunConfig
    trainer: Trainer
    engine: RolloutEngine
    seconds: dict[str, float] = field(default_factory=dict)
    """Durations of moves since the last `take_seconds`, by name, in seconds."""
    _limits: CallLimits = field(init=False)

    def __post_init__(self) -> None:
        self._limits = CallLimits(self.config.run)

    def take_seconds(self) -> dict[str, float]:
        """Return and reset the durations of moves, by name."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found

    async def start(self, version: int) -> None:
        """Publish the first version of this process. Trainer and engine have both started, with all their memory."""
        await self._clear(keep_weights=False)
        await self.publish(version)
        self.take_seconds()  # these moves belong to no batch

    async def enter_training(self, *, will_publish: bool = False) -> None:
        """Prepare for scoring and training. ``will_publish``: the next call is `publish`, not `enter_sampling`."""
        await self._clear(keep_weights=not will_publish)
        if self.config.placement.offload_trainer:
            await self._record_time("onload", self.trainer.onload())

    async def enter_sampling(self) -> None:
        """Resume sampling after a batch whose weights are not published yet."""
        if self.config.placement.colocated:
            await self._make_room()
            await self._record_time("resume", self.engine.resume())

    @asynccontextmanager
    async def trainer_loaded(self) -> AsyncIterator[None]:
        """Return a context in which the trainer's model and optimizer are on the device, to save or export."""
        if self.config.placement.offload_trainer:
            await self.enter_training()
        yield
        if self.config.placement.offload_trainer:
            await self.enter_sampling()

    async def send_to(self, engine: RolloutEngine, version: int) -> None:
        """Send the trainer's weights to another engine, which then serves this version. It must have no requests.

        Raises `SyncError`, `DeadlineError`.
        """
        await self.enter_training()
        await self._record_time("pause", engine.pause(engine.pause_mode))
        await self._transfer(engine, version)
        await self._record_time("resume", engine.resume())
        await self.enter_sampling()

    async def publish(self, version: int) -> SyncResult:
        """Send the trainer's weights as this version, and resume sampling. `enter_training` must precede it.

        If this fails, the engine stays paused, since it may have received only some of the weights. Raises `SyncError`
        and `DeadlineError`.
        """
        place = self.config.placement
        if not place.colocated:
            await self._record_time("pause", self.engine.pause(self.engine.pause_mode))
        if place.offload_engine:
            await self._record_time("wake", self.engine.wake(kv_cache=False))
        result = await self._transfer(self.engine, version)
        await self._make_room()
        await self._record_time("resume", self.engine.resume())
        return result

    async def _transfer(self, engine: RolloutEngine, version: int) -> SyncResult:
        """Transfer the weights, and retry with newly started servers if all receiving ones died."""
        while True:
            try:
                return await self._send(engine, version)
            except EngineLostError as error:
                log.warning("weight sync of version %d: trying again: %s", version, error)
                await engine.health()  # raises if too few servers are left
                await asyncio.sleep(RETRY_S)

    async def _send(self, engine: RolloutEngine, version: int) -> SyncResult:
        timeout_s = self.config.run.sync_timeout_s
        return await transfer(self.trainer, engine, version=version, timeout_s=timeout_s, limits=self._limits)

    async def _clear(self, *, keep_weights: bool) -> None:
        """Stop a colocated engine and release its memory for the trainer."""
        if self.config.placement.colocated:
            await self._record_time("pause", self.engine.pause(self.engine.pause_mode))
        if self.config.placement.offload_engine:
            await self._record_time("sleep", self.engine.sleep(keep_weights=keep_weights))

    async def _make_room(self) -> None:
        """Offload the trainer before the engine allocates its KV cache."""
        if self.config.placement.offload_trainer:
            await self._record_time("offload", self.trainer.offload())
        if self.config.placement.offload_engine:
            await self._record_time("wake", self.engine.wake(kv_cache=True))

    async def _record_time(self, what: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        try:
            return await work
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began
