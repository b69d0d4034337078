"""Who is awake when: trainer and engine side by side, or taking turns on the GPUs that they share."""

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
from plasmid.utils.waiting import GRACE, within

from .weight_sync import transfer

log = logging.getLogger(__name__)
T = TypeVar("T")
AGAIN_S = 1.0
"""Between two tries of a weight sync."""


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceScheduler:
    """Moves trainer and engine, in an order in which they never both need the memory of a GPU that they share.

    The engine draws no token between `to_trainer` and `to_engine` or `publish`: it may be without memory, and what it
    would sample is neither on-policy nor wanted while the trainer computes on the same GPU.
    """

    config: RunConfig
    trainer: Trainer
    engine: RolloutEngine
    seconds: dict[str, float] = field(default_factory=dict)
    """Of what was done for the other's turn, by name, until it is taken by `spent`."""

    def spent(self) -> dict[str, float]:
        """Seconds since the last time that it was asked, by what they were spent on."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found

    async def begin(self, version: int) -> None:
        """Publish the first version of this process. Trainer and engine are both up and have all their memory."""
        await self._clear(keep_weights=False)
        await self.publish(version)

    async def to_trainer(self, *, will_publish: bool = False) -> None:
        """Before a batch is scored and trained. ``will_publish``: `publish` ends this turn, not `to_engine`."""
        await self._clear(keep_weights=not will_publish)
        if self.config.placement.offload_trainer:
            await self._trainer("onload", self.trainer.onload())

    async def to_engine(self) -> None:
        """After a batch was trained whose weights are not published yet."""
        if self.config.placement.colocated:
            await self._make_room()
            await self._engine("resume", self.engine.resume())

    @asynccontextmanager
    async def trainer_at_hand(self) -> AsyncIterator[None]:
        """A turn in which a trainer that gives up its memory has it, to save or export."""
        if self.config.placement.offload_trainer:
            await self.to_trainer()
        yield
        if self.config.placement.offload_trainer:
            await self.to_engine()

    async def send_to(self, engine: RolloutEngine, version: int) -> None:
        """Give the trainer's weights to another engine, which then serves this version. It must have no requests.

        Raises `SyncError`, `DeadlineError`.
        """
        await self.to_trainer()
        await self._engine("pause", engine.pause(engine.pause_mode))
        await transfer(self.trainer, engine, version=version, timeout_s=self.config.run.sync_timeout_s)
        await self._engine("resume", engine.resume())
        await self.to_engine()

    async def mend(self, version: int) -> None:
        """Send what the engine holds once more, to parts of it that were started anew. The trainer must be idle."""
        await self.to_trainer(will_publish=True)
        await self.publish(version)

    async def publish(self, version: int) -> SyncReceipt:
        """Send the trainer's weights as this version; afterwards it is the engine's turn.

        The engine stays paused if anything fails: it may hold half of the new weights. Raises `SyncError`,
        `DeadlineError`.
        """
        place = self.config.placement
        if not place.colocated:
            await self._engine("pause", self.engine.pause(self.engine.pause_mode))
        if place.offload_engine:
            await self._engine("wake", self.engine.wake(kv_cache=False))
        receipt = await self._transfer(version)
        await self._make_room()
        await self._engine("resume", self.engine.resume())
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
                await asyncio.sleep(AGAIN_S)

    async def _clear(self, *, keep_weights: bool) -> None:
        """A colocated engine stops; its memory is the trainer's."""
        if self.config.placement.colocated:
            await self._engine("pause", self.engine.pause(self.engine.pause_mode))
        if self.config.placement.offload_engine:
            await self._engine("sleep", self.engine.sleep(keep_weights=keep_weights))

    async def _make_room(self) -> None:
        """The trainer leaves before the engine takes memory for its KV cache."""
        if self.config.placement.offload_trainer:
            await self._trainer("offload", self.trainer.offload())
        if self.config.placement.offload_engine:
            await self._engine("wake", self.engine.wake(kv_cache=True))

    async def _trainer(self, what: str, work: Awaitable[T]) -> T:
        limit_s = self.config.run.train_timeout_s * GRACE
        return await self._timed(what, within(limit_s, f"trainer.{what} (run.train_timeout_s)", work))

    async def _engine(self, what: str, work: Awaitable[T]) -> T:
        limit_s = self.config.run.sync_timeout_s * GRACE
        return await self._timed(what, within(limit_s, f"engine.{what} (run.sync_timeout_s)", work))

    async def _timed(self, what: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        try:
            return await work
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began
