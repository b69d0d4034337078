"""Experience replay: trained groups go back to a pool and are drawn again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from plasmid.config.loop import ReuseConfig
from plasmid.types.batch import GroupRef
from plasmid.utils.seeds import seed_of

from .producer import ProducedGroups, Producer


@dataclass(slots=True)
class _Batch:
    """A batch whose trained weights have not reached the engine yet."""

    new: int
    reused: int


class ReuseProducer:
    """Wraps another `producer.Producer`, and adds reused groups to its new ones.

    Reused groups occupy no slot of the inner producer, so only new groups are released to it. Draws depend on the run's
    seed and the number of batches taken, so a resumed run repeats them exactly.
    """

    def __init__(self, producer: Producer, settings: ReuseConfig, *, seed: int) -> None:
        self._producer, self._settings, self._seed = producer, settings, seed
        self._pool: list[GroupRef] = []
        self._taken = 0
        self._training: deque[_Batch] = deque()
        self._before_last: tuple[list[GroupRef], ProducedGroups] | None = None
        """The pool before the last take, and what that take got from the inner producer."""

    async def take(self, count: int, *, version: int) -> ProducedGroups:
        new = await self._producer.take(count, version=version)
        if not new.groups:
            return new
        self._before_last = self._pool, new
        self._pool = [group for group in self._pool if _age(group, version) <= self._settings.max_age]
        generator = np.random.default_rng(seed_of(self._seed, "reuse", self._taken))
        reused = self._draw(generator)
        self._taken += 1
        self._training.append(_Batch(new=len(new.groups), reused=len(reused)))
        self._write_back([*new.groups, *reused])
        return ProducedGroups(
            groups=_shuffle([*new.groups, *reused], generator) if reused else new.groups,
            dropped=new.dropped,
            metrics={**new.metrics, **self._metrics(reused, version)},
        )

    def put_back(self, taken: ProducedGroups) -> None:
        if self._before_last is not None:
            self._pool, new = self._before_last
            self._taken -= 1
            self._training.pop()
            self._producer.put_back(new)

    def _draw(self, generator: np.random.Generator) -> list[GroupRef]:
        count = min(self._settings.groups_per_batch, len(self._pool))
        return [self._pool[index] for index in sorted(generator.choice(len(self._pool), count, replace=False))]

    def _write_back(self, trained: Iterable[GroupRef]) -> None:
        """Count a use of every group. Keep groups that may be used again, and only the newest above `capacity`."""
        pool = {group.id: group for group in self._pool}
        for group in trained:
            pool[group.id] = replace(group, uses=group.uses + 1)
        left = [pool[id_] for id_ in sorted(pool) if pool[id_].uses < self._settings.max_uses]
        self._pool = left[-self._settings.capacity :]

    def _metrics(self, reused: Sequence[GroupRef], version: int) -> dict[str, float]:
        sizes = {"reuse/groups": float(len(reused)), "reuse/pool": float(len(self._pool))}
        if not reused:
            return sizes
        ages = [_age(group, version) for group in reused]
        return {**sizes, "reuse/age_mean": float(np.mean(ages)), "reuse/age_max": float(max(ages))}

    def release(self, count: int, *, version: int) -> None:
        new = 0
        while count > 0:
            batch = self._training.popleft()
            new, count = new + batch.new, count - batch.new - batch.reused
        self._producer.release(new, version=version)

    async def snapshot(self) -> tuple[dict[str, Any], tuple[GroupRef, ...]]:
        state, finished = await self._producer.snapshot()
        uses = {str(group.id): group.uses for group in self._pool}
        return {**state, "reuse": {"taken": self._taken, "uses": uses}}, (*finished, *self._pool)

    async def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        uses: Mapping[str, int] = state["reuse"]["uses"]
        await self._producer.restore(state, [group for group in finished if str(group.id) not in uses])
        self._pool = [replace(group, uses=uses[str(group.id)]) for group in finished if str(group.id) in uses]
        self._taken = int(state["reuse"]["taken"])

    def depths(self) -> Mapping[str, int]:
        return {**self._producer.depths(), "groups to reuse": len(self._pool)}

    async def close(self) -> None:
        await self._producer.close()


def _shuffle(groups: Sequence[GroupRef], generator: np.random.Generator) -> tuple[GroupRef, ...]:
    """Shuffle groups, so that each of several optimizer steps gets both new and reused ones."""
    return tuple(groups[index] for index in generator.permutation(len(groups)))


def _age(group: GroupRef, version: int) -> int:
    """Return the age of the oldest token, in policy versions; 0 without generated tokens."""
    return 0 if group.oldest_version is None else version - group.oldest_version
