"""Groups that were trained on, written back and drawn again: off-policy reuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from plasmid.config.reuse import ReuseConfig
from plasmid.types.batch import GroupRef
from plasmid.utils.seeds import seed_of

from .producer import Producer, Taken


@dataclass(slots=True)
class _Batch:
    """A batch whose weights have not reached the engine."""

    new: int
    reused: int


class ReuseProducer:
    """Implements `producer.Producer` around another one: new groups are its own, reused ones join them.

    Reused groups hold no slot of the other producer: it is told of the release of new ones only. The draw depends on
    the run's seed and the number of batches taken, so a resumed run draws as an uninterrupted one.
    """

    def __init__(self, producer: Producer, settings: ReuseConfig, *, seed: int) -> None:
        self._producer, self._settings, self._seed = producer, settings, seed
        self._pool: list[GroupRef] = []
        self._taken = 0
        self._training: deque[_Batch] = deque()

    async def take(self, count: int, *, version: int) -> Taken:
        new = await self._producer.take(count, version=version)
        if not new.groups:
            return new
        self._pool = [group for group in self._pool if _age(group, version) <= self._settings.max_age]
        generator = np.random.default_rng(seed_of(self._seed, "reuse", self._taken))
        reused = self._draw(generator)
        self._taken += 1
        self._training.append(_Batch(new=len(new.groups), reused=len(reused)))
        self._write_back([*new.groups, *reused])
        return Taken(
            groups=_mixed([*new.groups, *reused], generator) if reused else new.groups,
            dropped=new.dropped,
            metrics={**new.metrics, **self._metrics(reused, version)},
        )

    def _draw(self, generator: np.random.Generator) -> list[GroupRef]:
        count = min(self._settings.groups_per_batch, len(self._pool))
        return [self._pool[index] for index in sorted(generator.choice(len(self._pool), count, replace=False))]

    def _write_back(self, trained: Iterable[GroupRef]) -> None:
        """Count a use of every group; keep those that may have another one, the newest if there are too many."""
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

    def state(self) -> dict[str, Any]:
        uses = {str(group.id): group.uses for group in self._pool}
        return {**self._producer.state(), "reuse": {"taken": self._taken, "uses": uses}}

    def finished(self) -> tuple[GroupRef, ...]:
        return (*self._producer.finished(), *self._pool)

    def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        uses: Mapping[str, int] = state["reuse"]["uses"]
        self._producer.restore(state, [group for group in finished if str(group.id) not in uses])
        self._pool = [replace(group, uses=uses[str(group.id)]) for group in finished if str(group.id) in uses]
        self._taken = int(state["reuse"]["taken"])

    async def close(self) -> None:
        await self._producer.close()


def _mixed(groups: Sequence[GroupRef], generator: np.random.Generator) -> tuple[GroupRef, ...]:
    """In random order: a batch of several optimizer steps has then some of both kinds in each."""
    return tuple(groups[index] for index in generator.permutation(len(groups)))


def _age(group: GroupRef, version: int) -> int:
    """Policy versions since the oldest token; 0 if no policy drew any."""
    return 0 if group.oldest_version is None else version - group.oldest_version
