"""Groups that are sampled while the trainer trains."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..batch import GroupRef
from ..errors import EngineError
from .draws import Draw, Draws
from .producer import DropLimit, RollOut, Taken


class Stream:
    """Off-policy: keep ``slots`` groups between admission and the publish of the weights trained on them.

    A slot is held until its group is trained *and* the engine has the new weights; freeing it when the group is taken
    would admit a prompt that is sampled by a policy already one version behind. With
    ``slots = (max_staleness + 1) * sync_every * prompts_per_batch`` no group taken oldest first is staler than
    ``max_staleness``. Groups may finish out of order and slots may be more (over-sampling), so the bound is also
    enforced when groups are taken.
    """

    def __init__(self, draws: Draws, roll_out: RollOut, *, slots: int, max_staleness: int, limit: DropLimit) -> None:
        self._draws, self._roll_out = draws, roll_out
        self._free, self._max_staleness = slots, max_staleness
        self._limit = limit
        self._running: dict[asyncio.Task[GroupRef], Draw] = {}
        self._ready: list[GroupRef] = []
        self._dropped: list[GroupRef] = []
        self._ended = self._closed = False
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def _admit(self) -> None:
        while self._free > 0 and not self._ended:
            draw = self._draws.draw()
            if draw is None:
                self._ended = True
                return
            self._free -= 1
            task = asyncio.create_task(self._roll_out(draw))
            self._running[task] = draw
            task.add_done_callback(self._pump)

    def _pump(self, _: asyncio.Task[GroupRef]) -> None:
        """A rollout ended: refill its slot if it was dropped, also while the loop is busy training."""
        if self._closed:
            return
        try:
            self._collect()
            self._admit()
        except Exception as error:  # noqa: BLE001 - boundary of the callback: `take` raises it
            self._error = self._error or error
            self._ended = True
        self._changed.set()

    def _collect(self) -> None:
        """Move what has finished out of the running set; raise what a rollout raised."""
        for task in [task for task in self._running if task.done()]:
            draw = self._running.pop(task)
            if task.cancelled():  # by the worker: `close` ends collecting first
                raise EngineError(f"rollouts: prompt group {draw.id} was abandoned by its worker")
            group = task.result()
            self._draws.finished(draw, group)
            if group.dropped_by:
                self._drop(group)
            else:
                self._ready.append(group)
                self._limit.kept()

    def _drop(self, group: GroupRef) -> None:
        self._dropped.append(group)
        self._free += 1
        if group.dropped_by != "stale":
            self._limit.dropped(group)

    async def take(self, count: int, *, version: int) -> Taken:
        while True:
            self._changed.clear()
            if self._error is not None:
                raise self._error
            self._collect()
            self._drop_stale(version)
            self._admit()
            if len(self._ready) >= count or not self._running:
                break
            await self._changed.wait()
        self._ready.sort(key=lambda group: group.id)
        taken, self._ready = self._ready[:count], self._ready[count:]
        dropped, self._dropped = self._dropped, []
        return Taken(groups=tuple(taken), dropped=tuple(dropped))

    def _drop_stale(self, version: int) -> None:
        fresh: list[GroupRef] = []
        for group in self._ready:
            oldest = version if group.oldest_version is None else group.oldest_version
            if version - oldest > self._max_staleness:
                self._drop(replace(group, dropped_by="stale"))
            else:
                fresh.append(group)
        self._ready = fresh

    def release(self, count: int) -> None:
        self._free += count
        self._collect()
        self._admit()

    def state(self) -> dict[str, Any]:
        return self._draws.state(list(self._running.values()))

    def finished(self) -> tuple[GroupRef, ...]:
        return (*self._ready, *self._dropped)

    def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        self._draws.restore(state)
        self._ready = [group for group in finished if not group.dropped_by]
        self._dropped = [group for group in finished if group.dropped_by]
        self._free -= len(self._ready)

    async def close(self) -> None:
        self._ended = self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
