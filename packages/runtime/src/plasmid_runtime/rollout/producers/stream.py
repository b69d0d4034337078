"""Off-policy sampling, concurrently with training."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plasmid.components.buffer_policy import BufferPolicy
from plasmid.errors import EngineError
from plasmid.types.batch import GroupRef

from .draws import Draw, Draws
from .producer import DropLimit, ProducedGroups, RollOut


def count_due(ages: Mapping[int, int], *, bound: int, later: int, per_version: int) -> list[int]:
    """Return the minimum numbers of groups of age >= ``bound``, ``bound - 1``, ..., 0 that the next batch must include.

    Ages are in policy versions; ``ages`` has the number of finished and running groups by age. Batches after the next
    one can take ``later`` groups at the current version, and ``per_version`` at each later version. Groups that those
    batches cannot take before the groups exceed ``bound`` must be in the next batch (earliest deadline first).
    """
    total, due = 0, []
    for age in range(bound, -1, -1):
        total += ages.get(age, 0)
        due.append(max(0, total - later - (bound - age) * per_version))
    return due


ARRIVAL_S = 5.0
"""Maximum time that a save waits for the results of finished groups, in seconds. A resume samples groups whose results
arrive later again."""
SnapshotRollouts = Callable[[], Awaitable[Container[int]]]
"""Makes workers take a snapshot of unfinished rollouts; returns the ids of draws that finished before the snapshot."""


@dataclass(frozen=True, slots=True, eq=False)
class _PendingDraw:
    """A draw with running rollouts."""

    draw: Draw
    version: int
    """Policy version of the trainer when the draw was admitted; none of its tokens is older."""


class StreamProducer:
    """Off-policy sampling: at most ``slots`` groups are running, waiting for training, or waiting for a weight sync.

    A group occupies a slot from its draw until it has been trained on *and* the engine has the new weights. If `take`
    freed the slot, the next prompt would be sampled by a policy that is already one version behind. With
    ``slots = (max_staleness + 1) * sync_every * prompts_per_batch``, every group can be trained on within
    ``max_staleness`` versions. With ``when_stale = "wait"``, every group is: `take` waits for groups that would be too
    old for later batches, and chooses them first. The exception are weights that are published before ``sync_every``
    batches: the running groups then age faster than planned. With other values, groups may exceed the bound, because
    they finish late, because over-sampling adds slots, or because the buffer policy prefers other groups. Such groups
    are dropped or sampled again.
    """

    def __init__(
        self,
        draws: Draws,
        roll_out: RollOut,
        *,
        slots: int,
        max_staleness: int,
        sync_every: int,
        limit: DropLimit,
        policy: BufferPolicy,
        snapshot_rollouts: SnapshotRollouts | None = None,
    ) -> None:
        self._draws, self._roll_out, self._snapshot_rollouts = draws, roll_out, snapshot_rollouts
        self._free, self._max_staleness = slots, max_staleness
        self._limit, self._policy, self._sync_every = limit, policy, sync_every
        self._takes = 0  # since the run began, modulo `sync_every`
        self._running: dict[asyncio.Task[GroupRef], _PendingDraw] = {}
        self._finished: deque[asyncio.Task[GroupRef]] = deque()  # done tasks of `_running` that are not collected yet
        # Number of running draws by version, updated incrementally because there may be thousands of draws.
        self._running_at: Counter[int] = Counter()
        self._ready: list[GroupRef] = []
        self._ready_at: Counter[int | None] = Counter()
        self._dropped: list[GroupRef] = []
        self._ended = self._closed = False
        self._changed = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None
        self._drawing = asyncio.Lock()
        self._stale: list[GroupRef] = []  # to be sampled again in their slots
        self._error: Exception | None = None
        self._again: set[int] = set()  # ids of groups sampled again; the data already has their first rewards
        self._version = self._resampled = 0
        self._admitted: dict[int, int] = {}
        """Version at admission, by draw id, of draws restored by a resume; their stored tokens may be that old."""
        self._is_saving = False

    def _admit(self) -> None:
        """Start a task that fills free slots one at a time, because drawing a prompt may be slow."""
        if self._needs_draw() and not self._is_filling():
            self._filling = asyncio.create_task(self._fill())

    def _needs_draw(self) -> bool:
        return self._error is None and not self._closed and (bool(self._stale) or (self._free > 0 and not self._ended))

    def _is_filling(self) -> bool:
        return self._filling is not None and not self._filling.done()

    async def _fill(self) -> None:
        """Fill free slots with new draws, after sampling stale groups again in their own slots."""
        try:
            while self._needs_draw():
                async with self._drawing:
                    if self._stale:
                        draw = await self._draws.redraw(self._stale[0])
                        del self._stale[0]
                    elif drawn := await self._draws.draw(1):
                        draw = drawn[0]
                        self._free -= 1
                    else:
                        self._ended = True
                        break
                    self._start(_PendingDraw(draw, self._admitted.pop(draw.id, self._version)))
        except Exception as error:  # noqa: BLE001 - boundary of the task: `take` raises it
            self._error = self._error or error
        self._changed.set()

    def _start(self, running: _PendingDraw) -> None:
        task = asyncio.create_task(self._roll_out(running.draw))
        self._running[task] = running
        self._running_at[running.version] += 1
        task.add_done_callback(self._refill)

    def _refill(self, task: asyncio.Task[GroupRef]) -> None:
        """Handle a finished group. If it was dropped, refill its slot, even while the loop trains."""
        self._finished.append(task)
        self._advance()

    def _advance(self) -> None:
        """Collect finished groups and fill free slots."""
        if self._closed or self._is_saving:
            return
        try:
            self._collect()
        except Exception as error:  # noqa: BLE001 - boundary of the callback: `take` raises it
            self._error = self._error or error
        self._admit()
        self._changed.set()

    def _collect(self) -> None:
        """Move finished groups out of the running set. Raises errors of their rollouts."""
        while self._finished:
            self._take_up(self._finished.popleft())

    def _take_up(self, task: asyncio.Task[GroupRef]) -> None:
        """Move one group out of the running set. Raises errors of its rollouts."""
        running = self._running.pop(task)
        self._running_at[running.version] -= 1
        if task.cancelled():  # only the worker can have cancelled it: groups are not collected after `close`
            raise EngineError(f"rollouts: prompt group {running.draw.id} was abandoned by its worker")
        group = task.result()
        if group.id not in self._again:
            self._draws.finish(running.draw, group)
        if group.dropped_by:
            self._drop(group)
        elif self._staleness(group) > self._max_staleness:
            self._end(group)
        else:
            self._ready.append(group)
            self._ready_at[group.oldest_version] += 1
            self._limit.count_kept()

    def _drop(self, group: GroupRef) -> None:
        self._dropped.append(group)
        self._again.discard(group.id)
        self._free += 1
        if group.dropped_by != "stale":
            self._limit.count_dropped(group)

    async def take(self, count: int, *, version: int) -> ProducedGroups:
        self._version = version
        self._end_stale()
        while True:
            self._changed.clear()
            if self._error is not None:
                raise self._error
            self._collect()
            self._admit()
            if not (self._running or self._is_filling()) or (len(self._ready) >= count and not self._waits(count)):
                break
            await self._changed.wait()
        taken = self._choose(count)
        self._takes = (self._takes + 1) % self._sync_every
        chosen = {group.id for group in taken}
        self._again -= chosen
        self._set_ready([group for group in self._ready if group.id not in chosen])
        dropped, self._dropped = self._dropped, []
        resampled, self._resampled = self._resampled, 0
        metrics = {"rollout/resampled": float(resampled)} if self._policy.when_stale == "resample" else {}
        return ProducedGroups(groups=tuple(taken), dropped=tuple(dropped), metrics=metrics)

    def put_back(self, taken: ProducedGroups) -> None:
        self._takes = (self._takes - 1) % self._sync_every
        self._set_ready([*self._ready, *taken.groups])
        self._dropped = [*taken.dropped, *self._dropped]

    def _choose(self, count: int) -> list[GroupRef]:
        """Choose groups that are due, then those with the highest priority. Returns them in draw order."""
        self._ready.sort(key=lambda group: group.id)
        ranked = sorted(self._ready, key=self._rank)
        chosen: dict[int, GroupRef] = {}
        for age, due in self._due(count):
            old = [group for group in ranked if self._staleness(group) >= age and group.id not in chosen]
            chosen |= {group.id: group for group in old[: max(0, due - len(chosen))]}
        others = [group for group in ranked if group.id not in chosen]
        return sorted([*chosen.values(), *others[: count - len(chosen)]], key=lambda group: group.id)

    def _rank(self, group: GroupRef) -> tuple[bool, float]:
        """Return the sort key of a group: first groups that were sampled again, then by decreasing priority."""
        return group.id not in self._again, -self._policy.priority(group, version=self._version)

    def _due(self, count: int) -> list[tuple[int, int]]:
        """Return pairs (age, number of groups of at least this age that the next batch must include), oldest first."""
        if self._policy.when_stale != "wait":
            return []
        ages = self._ready_ages()
        for version, number in self._running_at.items():
            ages[self._version - version] += number
        for version in self._admitted.values():
            ages[self._version - version] += 1
        later = (self._sync_every - 1 - self._takes) * count
        due = count_due(ages, bound=self._max_staleness, later=later, per_version=self._sync_every * count)
        return [(self._max_staleness - i, min(number, count)) for i, number in enumerate(due) if number]

    def _waits(self, count: int) -> bool:
        """Return True if the next batch must include a group that is still running."""
        due, ready = self._due(count), self._ready_ages()
        return any(sum(number for age, number in ready.items() if age >= oldest) < most for oldest, most in due)

    def _ready_ages(self) -> Counter[int]:
        """Count the ready groups by age in versions."""
        ages: Counter[int] = Counter()
        for version, number in self._ready_at.items():
            ages[0 if version is None else self._version - version] += number
        return ages

    def _set_ready(self, groups: list[GroupRef]) -> None:
        self._ready, self._ready_at = groups, Counter(group.oldest_version for group in groups)
        self._running_at = +self._running_at  # removes versions with a count of 0

    def _staleness(self, group: GroupRef) -> int:
        return 0 if group.oldest_version is None else self._version - group.oldest_version

    def _end_stale(self) -> None:
        """Drop groups that exceed the bound at the current version, or sample them again."""
        stale = [group for group in self._ready if self._staleness(group) > self._max_staleness]
        if stale:
            self._set_ready([group for group in self._ready if self._staleness(group) <= self._max_staleness])
        for group in stale:
            self._end(group)

    def _end(self, group: GroupRef) -> None:
        """Drop a group that exceeds the bound, or sample it again in its slot."""
        if self._policy.when_stale == "resample":
            self._resampled += 1
            self._again.add(group.id)
            self._stale.append(group)
        else:
            self._drop(replace(group, dropped_by="stale"))

    def release(self, count: int, *, version: int) -> None:
        self._free += count
        self._version = version
        self._collect()
        self._admit()

    async def snapshot(self) -> tuple[dict[str, Any], tuple[GroupRef, ...]]:
        async with self._drawing:  # between draws, when the data stream and this producer agree on the draws
            self._is_saving = True  # groups that arrive from now on count as unfinished, as in the workers' snapshot
            try:
                if self._snapshot_rollouts is not None:
                    await self._collect_answered(await self._snapshot_rollouts())
                pending = {running.draw.id: running.draw.prompt.id for running in self._running.values()}
                pending |= {group.id: group.prompt_id for group in self._stale}
                versions = {running.draw.id: running.version for running in self._running.values()} | self._admitted
                again, finished = sorted(self._again), (*self._ready, *self._dropped)
                state = await self._draws.state(pending)
            finally:
                self._is_saving = False
                if self._finished:
                    self._advance()
        admitted = {str(id_): versions[id_] for id_ in sorted(versions)}
        return {**state, "again": again, "admitted": admitted, "takes": self._takes}, finished

    async def _collect_answered(self, draw_ids: Container[int]) -> None:
        """Collect the groups of these draws, which workers have finished; wait for results still in transit."""
        answered = [task for task, running in self._running.items() if running.draw.id in draw_ids]
        if answered:
            await asyncio.wait(answered, timeout=ARRIVAL_S)
        for task in answered:
            # A resume samples the groups of all other tasks again.
            if task in self._finished and not task.cancelled() and not task.exception():
                self._finished.remove(task)
                try:
                    self._take_up(task)
                except Exception as error:  # noqa: BLE001 - boundary of saves: `take` raises it
                    self._error = self._error or error

    async def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        await self._draws.restore(state)
        self._again, self._takes = set(state.get("again", ())), int(state.get("takes", 0))
        self._admitted = {int(id_): int(version) for id_, version in state.get("admitted", {}).items()}
        self._set_ready([group for group in finished if not group.dropped_by])
        self._dropped = [group for group in finished if group.dropped_by]
        self._free -= len(self._ready)

    def depths(self) -> Mapping[str, int]:
        running, ready = len(self._running), len(self._ready)
        return {"groups in flight": running, "groups ready": ready, "free slots": self._free}

    async def close(self) -> None:
        self._closed = True
        running = [*self._running, *([] if self._filling is None else [self._filling])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
