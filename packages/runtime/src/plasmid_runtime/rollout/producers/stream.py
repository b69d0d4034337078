"""Groups that are sampled while the trainer trains."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plasmid.components.buffer_policy import BufferPolicy
from plasmid.errors import EngineError
from plasmid.types.batch import GroupRef

from .draws import Draw, Draws
from .producer import DropLimit, RollOut, Taken


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """A draw whose rollouts go on."""

    draw: Draw
    version: int
    """The trainer's when it was admitted: none of its tokens is older."""


class StreamProducer:
    """Off-policy: keep ``slots`` groups between admission and the publish of the weights trained on them.

    A slot is held until its group is trained *and* the engine has the new weights; freeing it when the group is taken
    would admit a prompt that is sampled by a policy already one version behind. With
    ``slots = (max_staleness + 1) * sync_every * prompts_per_batch`` no group taken oldest first is staler than
    ``max_staleness``. Groups may finish out of order, slots may be more (over-sampling) and the policy may prefer
    others, so the bound is also enforced when groups are taken, whatever the policy says.
    """

    def __init__(
        self,
        draws: Draws,
        roll_out: RollOut,
        *,
        slots: int,
        max_staleness: int,
        limit: DropLimit,
        policy: BufferPolicy,
    ) -> None:
        self._draws, self._roll_out = draws, roll_out
        self._free, self._max_staleness = slots, max_staleness
        self._limit, self._policy = limit, policy
        self._running: dict[asyncio.Task[GroupRef], _Running] = {}
        self._ready: list[GroupRef] = []
        self._dropped: list[GroupRef] = []
        self._ended = self._closed = False
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._again: set[int] = set()  # rolled out before, so the data have been told what became of it
        self._version = self._resampled = 0

    def _admit(self) -> None:
        while self._free > 0 and not self._ended:
            draw = self._draws.draw()
            if draw is None:
                self._ended = True
                return
            self._free -= 1
            self._start(_Running(draw, self._version))

    def _start(self, running: _Running) -> None:
        task = asyncio.create_task(self._roll_out(running.draw))
        self._running[task] = running
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
            running = self._running.pop(task)
            if task.cancelled():  # by the worker: `close` ends collecting first
                raise EngineError(f"rollouts: prompt group {running.draw.id} was abandoned by its worker")
            group = task.result()
            if group.id not in self._again:
                self._draws.finished(running.draw, group)
            if group.dropped_by:
                self._drop(group)
            else:
                self._ready.append(group)
                self._limit.kept()

    def _drop(self, group: GroupRef) -> None:
        self._dropped.append(group)
        self._again.discard(group.id)
        self._free += 1
        if group.dropped_by != "stale":
            self._limit.dropped(group)

    async def take(self, count: int, *, version: int) -> Taken:
        self._version = version
        while True:
            self._changed.clear()
            if self._error is not None:
                raise self._error
            self._collect()
            self._end_stale()
            self._admit()
            if not self._running or (len(self._ready) >= count and not self._waits()):
                break
            await self._changed.wait()
        self._ready.sort(key=lambda group: group.id)
        taken = sorted(self._ready, key=self._rank)[:count]
        taken.sort(key=lambda group: group.id)
        chosen = {group.id for group in taken}
        self._again -= chosen
        self._ready = [group for group in self._ready if group.id not in chosen]
        dropped, self._dropped = self._dropped, []
        resampled, self._resampled = self._resampled, 0
        metrics = {"rollout/resampled": float(resampled)} if self._policy.when_stale == "resample" else {}
        return Taken(groups=tuple(taken), dropped=tuple(dropped), metrics=metrics)

    def _rank(self, group: GroupRef) -> tuple[bool, float]:
        """Smallest first: what has its last chance, or had it once already, then by the policy."""
        last_chance = self._policy.when_stale == "wait" and self._staleness(group) >= self._max_staleness
        return not (last_chance or group.id in self._again), -self._policy.priority(group, version=self._version)

    def _waits(self) -> bool:
        """True if something is under way that may be past the bound after the next batch."""
        return self._policy.when_stale == "wait" and any(
            self._version - running.version >= self._max_staleness for running in self._running.values()
        )

    def _staleness(self, group: GroupRef) -> int:
        return 0 if group.oldest_version is None else self._version - group.oldest_version

    def _end_stale(self) -> None:
        """Drop what is past the bound, or sample it again in the slot that it holds."""
        stale = [group for group in self._ready if self._staleness(group) > self._max_staleness]
        self._ready = [group for group in self._ready if self._staleness(group) <= self._max_staleness]
        for group in stale:
            if self._policy.when_stale == "resample":
                self._resampled += 1
                self._again.add(group.id)
                self._start(_Running(self._draws.again(group), self._version))
            else:
                self._drop(replace(group, dropped_by="stale"))

    def release(self, count: int, *, version: int) -> None:
        self._free += count
        self._version = version
        self._collect()
        self._admit()

    def state(self) -> dict[str, Any]:
        pending = [running.draw for running in self._running.values()]
        return {**self._draws.state(pending), "again": sorted(self._again)}

    def finished(self) -> tuple[GroupRef, ...]:
        return (*self._ready, *self._dropped)

    def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        self._draws.restore(state)
        self._again = set(state.get("again", ()))
        self._ready = [group for group in finished if not group.dropped_by]
        self._dropped = [group for group in finished if group.dropped_by]
        self._free -= len(self._ready)

    async def close(self) -> None:
        self._ended = self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
