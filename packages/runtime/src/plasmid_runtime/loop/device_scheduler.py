"""Memory and weights of trainer and engine, side by side or on the GPUs that they share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from plasmid.config.run import RunConfig
from plasmid.errors import EngineLostError
from plasmid.protocols import RolloutEngine, Trainer
from plasmid.types import SyncReceipt

from .weight_sync import transfer

log = logging.getLogger(__name__)
T = TypeVar("T")
RETRY_S = 1.0
"""Interval between two tries of a weight sync."""


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceScheduler:
    """Moves trainer and engine, in an order in which they never both need the memory of a GPU that they share.

    A colocated engine draws no token between `enter_training` and `enter_sampling` or `publish`: it may be without
    memory, and what it would sample is not on-policy.
    """

    config: RunConfig
    trainer: Trainer
    engine: RolloutEngine
    seconds: dict[str, float] = field(default_factory=dict)
    """Of moves between trainer and engine, by name, until `take_seconds`."""

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call, by what they were spent on."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found

    async def start(self, version: int) -> None:
        """Publish the first version of this process. Trainer and engine are both up and have all their memory."""
        await self._clear(keep_weights=False)
        await self.publish(version)

    async def enter_training(self, *, will_publish: bool = False) -> None:
        """Before a batch is scored and trained. ``will_publish``: `publish` follows, not `enter_sampling`."""
        await self._clear(keep_weights=not will_publish)
        if self.config.placement.offload_trainer:
            await self._timed("onload", self.trainer.onload())

    async def enter_sampling(self) -> None:
        """After a batch was trained whose weights are not published yet."""
        if self.config.placement.colocated:
            await self._make_room()
            await self._timed("resume", self.engine.resume())

    @asynccontextmanager
    async def trainer_loaded(self) -> AsyncIterator[None]:
        """A context in which a trainer that gives up its memory has it, to save or export."""
        if self.config.placement.offload_trainer:
            await self.enter_training()
        yield
        if self.config.placement.offload_trainer:
            await self.enter_sampling()

    async def send_to(self, engine: RolloutEngine, version: int) -> None:
        """Give the trainer's weights to another engine, which then serves this version. It must have no requests.

        Raises `SyncError`, `DeadlineError`.
        """
        await self.enter_training()
        await self._timed("pause", engine.pause(engine.pause_mode))
        await transfer(self.trainer, engine, version=version, timeout_s=self.config.run.sync_timeout_s)
        await self._timed("resume", engine.resume())
        await self.enter_sampling()

    async def resend(self, version: int) -> None:
        """Send what the engine holds once more, to parts of it that were started anew. The trainer must be idle."""
        await self.enter_training(will_publish=True)
        await self.publish(version)

    async def publish(self, version: int) -> SyncReceipt:
        """Send the trainer's weights as this version; afterwards the engine samples.

        The engine stays paused if anything fails: it may hold half of the new weights. Raises `SyncError`,
        `DeadlineError`.
        """
        place = self.config.placement
        if not place.colocated:
            await self._timed("pause", self.engine.pause(self.engine.pause_mode))
        if place.offload_engine:
            await self._timed("wake", self.engine.wake(kv_cache=False))
        receipt = await self._transfer(version)
        await self._make_room()
        await self._timed("resume", self.engine.resume())
        return receipt

    async def _transfer(self, version: int) -> SyncReceipt:
        """Try again with the servers that come up when all that were to take the weights have gone meanwhile."""
        while True:
            try:
                return await transfer(
                    self.trainer, self.engine, version=version, timeout_s=self.config.run.sync_timeout_s
                )
            except EngineLostError as error:
                log.warning("weight sync of version %d: trying again: %s", version, error)
                await self.engine.health()  # raises when too little of the engine is left to wait for
                await asyncio.sleep(RETRY_S)

    async def _clear(self, *, keep_weights: bool) -> None:
        """A colocated engine stops; its memory is the trainer's."""
        if self.config.placement.colocated:
            await self._timed("pause", self.engine.pause(self.engine.pause_mode))
        if self.config.placement.offload_engine:
            await self._timed("sleep", self.engine.sleep(keep_weights=keep_weights))

    async def _make_room(self) -> None:
        """The trainer leaves before the engine takes memory for its KV cache."""
        if self.config.placement.offload_trainer:
            await self._timed("offload", self.trainer.offload())
        if self.config.placement.offload_engine:
            await self._timed("wake", self.engine.wake(kv_cache=True))

    async def _timed(self, what: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        try:
            return await work
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began
