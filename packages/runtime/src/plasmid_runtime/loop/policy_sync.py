"""Keeps the engine on the trainer's policy: publishes versions, checks them by a canary, repairs restarted servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from plasmid.config.run import RunConfig
from plasmid.protocols import RolloutEngine, Trainer

from ..checkpoint.folder import Progress
from ..rollout.producers.producer import Producer
from .canary import Canary
from .device_scheduler import DeviceScheduler

POLL_S = 1.0
"""Interval between two checks for servers that lack weights."""


@dataclass(slots=True, kw_only=True, eq=False)
class PolicySync:
    """Publishes the trainer's weights to the engine and counts versions in ``progress``.

    The canary is part of it: its answer must be awaited before the engine is paused, and an engine that lost the
    weights meanwhile can answer only once they are sent again.
    """

    config: RunConfig
    trainer: Trainer
    engine: RolloutEngine
    producer: Producer
    progress: Progress
    begin_phase: Callable[[str, int, int], None]
    """Tells observers of a phase, the batch and the version."""
    devices: DeviceScheduler = field(init=False)
    canary: Canary | None = field(init=False, default=None)
    """None for engines that need none."""

    def __post_init__(self) -> None:
        self.devices = DeviceScheduler(config=self.config, trainer=self.trainer, engine=self.engine)
        plan = None if self.config.rollout is None else self.config.rollout.canary()
        if plan is not None:
            ranks, limit_s = self.config.placement.trainer_ranks, self.config.run.sync_timeout_s
            self.canary = Canary(self.engine, self.trainer, plan, copies=ranks, limit_s=limit_s)

    async def start(self) -> None:
        """Publish the first version of this process."""
        self._begin_phase()
        await self.devices.start(self.progress.version)
        await self.ask_canary()

    def is_due(self, batch: int) -> bool:
        """True if the weights are to be published after this many batches."""
        return batch % self.config.run.sync_every == 0 or batch >= self.config.run.batches

    async def publish(self) -> dict[str, float]:
        """Send the trainer's weights as the next version and release the groups trained on. Returns metrics."""
        self._begin_phase()
        started = time.monotonic()
        receipt = await self.devices.publish(self.progress.version + 1)
        self.devices.seconds["sync"] = time.monotonic() - started
        self.progress.version += 1
        await self.ask_canary()
        self.producer.release(self.progress.unpublished, version=self.progress.version)
        self.progress.unpublished = 0
        phases = {f"sync/{name}_s": seconds for name, seconds in receipt.phases.items()}
        return {"sync/bytes": float(receipt.num_bytes), "sync/transfer_s": receipt.seconds, **phases}

    async def send_to(self, engine: RolloutEngine) -> None:
        """Send the present version to another engine."""
        await self.devices.send_to(engine, self.progress.version)

    async def enter_training(self, *, will_publish: bool) -> dict[str, float]:
        """Free the trainer's memory and have the canary prove the version that sampled. Returns metrics.

        ``will_publish``: `publish` follows, not `enter_sampling`.
        """
        await self._canary_answered()
        await self.devices.enter_training(will_publish=will_publish)
        return {} if self.canary is None else await self.canary.check()

    async def enter_sampling(self) -> None:
        """Let the engine go on after a batch whose weights are not published yet."""
        await self.devices.enter_sampling()

    def trainer_loaded(self) -> AbstractAsyncContextManager[None]:
        """A context in which the trainer has its memory."""
        return self.devices.trainer_loaded()

    async def wait(self, work: set[asyncio.Future[Any]]) -> None:
        """Wait for the first of ``work``; send weights again to parts of the engine that were started anew.

        The trainer must be idle. Raises `EngineError` when too little of the engine is left.
        """
        while True:
            done, _ = await asyncio.wait(work, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if self.engine.needs_weights():
                await self._resend()

    async def _resend(self) -> None:
        if self.progress.unpublished:  # the trainer is ahead of what the engine held
            await self.publish()
        else:
            await self.devices.resend(self.progress.version)
            await self.ask_canary()

    async def ask_canary(self) -> None:
        """Ask about the present version. Waits for the answer only if nothing else may be asked meanwhile."""
        if self.canary is not None:
            self.canary.ask(self.progress.version)
            if self.canary.plan.alone:
                await self._canary_answered()

    async def _canary_answered(self) -> None:
        """Wait for an answer while the engine may draw. One that lacks weights by now gets them and is asked anew."""
        while self.canary is not None and self.canary.asked is not None and not self.canary.asked.done():
            await self.wait({self.canary.asked})

    def take_seconds(self) -> dict[str, float]:
        """Seconds of syncs and of moves between trainer and engine since the last call."""
        return self.devices.take_seconds()

    async def close(self) -> None:
        """Cancel the canary's open request."""
        if self.canary is not None:
            await self.canary.close()

    def _begin_phase(self) -> None:
        self.begin_phase("sync", self.progress.batch, self.progress.version)
