"""The rollout worker processes of a run, called from its driver."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from plasmid.protocols import Actor, call
from plasmid.types.batch import GroupRef
from plasmid.utils.waiting import together

from .worker import Job, RolloutWorker

GRACE_S = 60.0
"""Added to the deadline of a group: rollouts and rewards keep theirs themselves, and their errors say more."""
WRITE_S = 600.0
"""Longest time to write the samples of one batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerPool:
    """The rollout worker processes; jobs are dealt out to them by group."""

    actors: tuple[Actor, ...]
    rollout_s: float
    """Longest time for the rollouts of a group, which run at once."""
    reward_s: float
    """Longest time for all rewards of one sample."""
    in_order: bool = False
    """Groups are judged in the order in which they are asked for, so that what components remember is repeatable."""
    last: dict[str, str] = field(default_factory=dict)
    """The job that was last given to each process."""

    async def roll_out(self, job: Job) -> GroupRef:
        """Make one prompt group. Raises what its rewards raise, `ActorDiedError`, `DeadlineError`."""
        actor = self.actors[job.group_id % len(self.actors)]
        if self.in_order:
            job = replace(job, after=self.last.get(actor.name, ""))
            self.last[actor.name] = job.name
        limit_s = self.rollout_s + self.reward_s * len(job.sessions()) + GRACE_S
        return await call(actor, limit_s, RolloutWorker.roll_out, job)

    async def write(self, path: Path, groups: tuple[GroupRef, ...], step: int) -> None:
        """Write whole groups into the sample store."""
        dropped = {group.id: group.dropped_by for group in groups if group.dropped_by}
        refs = [group.whole for group in groups]
        await call(self.actors[0], WRITE_S, RolloutWorker.write, path, refs, step, dropped)

    async def mark(self) -> None:
        """Mark the present states of components as those that the next `save` writes."""
        await together(call(actor, WRITE_S, RolloutWorker.mark) for actor in self.actors)

    async def save(self, folder: Path) -> None:
        """Write the marked states of each process's components, one file each."""
        folder.mkdir()
        files = [folder / f"{index}.json" for index in range(len(self.actors))]
        given = zip(self.actors, files, strict=True)
        await together(call(actor, WRITE_S, RolloutWorker.save, file) for actor, file in given)

    async def restore(self, folder: Path) -> None:
        """Restore the states. Those of process j then go to process j modulo the number of processes now."""
        then = len(list(folder.glob("*.json")))
        shares = [[folder / f"{j}.json" for j in range(i, then, len(self.actors))] for i in range(len(self.actors))]
        given = [(actor, files) for actor, files in zip(self.actors, shares, strict=True) if files]
        await together(call(actor, WRITE_S, RolloutWorker.restore, files) for actor, files in given)

    async def close(self) -> None:
        """Stop the processes."""
        await asyncio.gather(*(actor.stop() for actor in self.actors))
