"""Publish policy versions to the engine, check them with a canary prompt, and update restarted servers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from plasmid.config.run import RunConfig
from plasmid.protocols import RolloutEngine, Trainer
from plasmid.utils.waiting import deadline

from ..checkpoint.folder import Progress
from ..rollout.producers.producer import Producer
from .canary import Canary
from .device_scheduler import DeviceScheduler

log = logging.getLogger(__name__)
POLL_S = 1.0
"""Interval between checks for restarted servers that need weights, in seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class PolicySync:
    """Publishes the trainer's weights to the engine and counts versions in ``progress``.

    Also runs the canary, for two reasons: its answer must arrive before the engine is paused, and a restarted server
    can answer only after it has received the weights again.
    """

    config: RunConfig
    trainer: Trainer
    engine: RolloutEngine
    producer: Producer
    progress: Progress
    begin_phase: Callable[[str, int, int], None]
    """Notifies observers of a phase, with batch and version."""
    devices: DeviceScheduler = field(init=False)
    canary: Canary | None = field(init=False, default=None)
    """None for engines that do not need a canary."""
    _evaluation_engine: RolloutEngine | None = field(init=False, default=None)
    """The engine of the last `send_to`."""

    def __post_init__(self) -> None:
        self.devices = DeviceScheduler(config=self.config, trainer=self.trainer, engine=self.engine)
        plan = None if self.config.rollout is None else self.config.rollout.canary()
        if plan is not None:
            plan = replace(plan, tolerance=0.0) if self.config.run.deterministic else plan
            ranks, limit_s = self.config.placement.trainer_ranks, self.config.run.sync_timeout_s
            self.canary = Canary(self.engine, self.trainer, plan, copies=ranks, limit_s=limit_s)

    async def start(self) -> None:
        """Publish the policy that the trainer loaded at start-up."""
        self._begin_phase()
        await self.devices.start(self.progress.version)
        await self.ask_canary()

    def is_due(self, batch: int) -> bool:
        """Return True if the weights must be published after this many trained batches."""
        return batch % self.config.run.sync_every == 0 or batch >= self.config.run.batches

    async def publish(self) -> dict[str, float]:
        """Send the trainer's weights as the next version and release the groups trained on. Returns metrics.

        Call `enter_training` first.
        """
        self._begin_phase()
        started = time.monotonic()
        result = await self.devices.publish(self.progress.version + 1)
        self.devices.seconds["sync"] = time.monotonic() - started
        self.progress.version += 1
        published, self.progress.unpublished = self.progress.unpublished, 0
        await self.ask_canary()
        self.producer.release(published, version=self.progress.version)
        phases = {f"sync/{name}_s": seconds for name, seconds in result.phases.items()}
        return {"sync/bytes": float(result.num_bytes), "sync/transfer_s": result.seconds, **phases}

    async def send_to(self, engine: RolloutEngine) -> None:
        """Send the current version to an engine for evaluations."""
        self._evaluation_engine = engine
        await self.devices.send_to(engine, self.progress.version)

    async def enter_training(self, *, will_publish: bool) -> dict[str, float]:
        """Make GPU memory available to the trainer, and run the canary check of the current version. Returns metrics.

        ``will_publish`` is True if the caller calls `publish` next, False if it calls `DeviceScheduler.enter_sampling`.
        """
        await self._await_canary()
        await self.devices.enter_training(will_publish=will_publish)
        return {} if self.canary is None else await self.canary.check()

    async def leave_training(self, *, will_publish: bool | None) -> None:
        """Publish the trained batches without training another one, so that a checkpoint can be written.

        ``will_publish`` is the argument of the last `enter_training` if that batch has not been trained, else None.
        """
        if will_publish is False:
            await self.devices.enter_sampling()
        if not will_publish and self.progress.unpublished:
            await self.enter_training(will_publish=True)
        if will_publish or self.progress.unpublished:
            await self.send_current()

    async def wait(self, work: set[asyncio.Future[Any]]) -> None:
        """Wait until one of ``work`` is done; meanwhile, send the weights to restarted servers.

        The trainer must be idle. Raises `EngineError` if too few servers are left.
        """
        while True:
            done, _ = await asyncio.wait(work, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if self.engine.needs_weights():
                await self._resend()
            other = self._evaluation_engine
            if other is not None and other.needs_weights() and self.progress.unpublished == 0:
                log.warning(
                    "a server for evaluations restarted: evaluations in progress continue with version %d",
                    self.progress.version,
                )
                await self.send_to(other)

    async def _resend(self) -> None:
        await self.devices.enter_training(will_publish=True)
        await self.send_current()

    async def send_current(self) -> None:
        """Send the trainer's weights, as the next version if the trainer is ahead. Call `enter_training` first."""
        if self.progress.unpublished:
            await self.publish()
        else:
            await self.devices.publish(self.progress.version)
            await self.ask_canary()

    async def ask_canary(self) -> None:
        """Send the canary request for the current version. Waits for the answer only if it must run alone."""
        if self.canary is not None:
            self.canary.start(self.progress.version)
            if self.canary.plan.alone:
                await self._await_canary()

    async def _await_canary(self) -> None:
        """Wait for the canary's answer. If a server lacks weights, sends them and repeats the request."""
        limit_s = (
            self.config.run.sync_timeout_s + self.config.placement.start_timeout_s
        )  # includes the start of a new server
        async with deadline(limit_s, f"canary of version {self.progress.version}", missing="answer"):
            while self.canary is not None and self.canary.pending is not None and not self.canary.pending.done():
                await self.wait({self.canary.pending})

    async def close(self) -> None:
        """Cancel the canary's open request."""
        if self.canary is not None:
            await self.canary.close()

    def _begin_phase(self) -> None:
        self.begin_phase("sync", self.progress.batch, self.progress.version)
