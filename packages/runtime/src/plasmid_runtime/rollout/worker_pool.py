"""The driver's handle on the rollout worker processes."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from plasmid.errors import DeadlineError
from plasmid.protocols import Actor, EngineClient, Ref, TeacherClient, call
from plasmid.types.batch import GroupRef
from plasmid.utils.waiting import run_together
from plasmid.utils.waits.ledger import LEDGER
from plasmid_workflows.turns import Turn

from .worker import Job, RolloutWorker

GRACE_S = 60.0
"""Margin on the deadline of a group's rollouts, in seconds. Workers enforce the deadline of each rollout, whose error
is more specific, and write a report first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerPool:
    """The rollout worker processes. Jobs are assigned to them by group id."""

    actors: tuple[Actor, ...]
    rollout_s: float
    """Maximum duration of a group's rollouts, which run concurrently, in seconds, including a teacher's answers."""
    write_s: float
    """Maximum time to write samples, or to save or restore the state of components, in seconds."""
    in_order: bool = False
    """Score groups in the order of their requests, so that the state of components is reproducible."""
    last: dict[str, str] = field(default_factory=dict)
    """The last job of each process."""
    resumed: dict[str, Ref[tuple[Turn, ...]]] = field(default_factory=dict)
    """Turns from the checkpoint of the resumed run for jobs that have not ended since, by name."""
    drawn: dict[str, Ref[tuple[Turn, ...]]] = field(default_factory=dict)
    """Turns of unfinished jobs at the last `snapshot`."""

    async def open_early(self, *, limit_s: float) -> None:
        """Open the rewards of every process that need no engine."""
        await run_together(call(actor, limit_s, RolloutWorker.open_early) for actor in self.actors)

    async def open(self, client: EngineClient, teacher: TeacherClient | None = None, *, limit_s: float) -> None:
        """Open the other components of every process, which may send requests to engine and teacher from now on."""
        await run_together(call(actor, limit_s, RolloutWorker.open, client, teacher) for actor in self.actors)

    async def roll_out(self, job: Job) -> GroupRef:
        """Generate one prompt group. Raises errors of its rewards, `ActorDiedError` and `DeadlineError`.

        The deadline only applies to the rollouts: rewards have their own, which exclude time in queues.
        """
        actor = self.actors[job.group_id % len(self.actors)]
        if self.in_order:
            job = replace(job, after=self.last.get(actor.name, ""))
            self.last[actor.name] = job.name
        job = replace(job, drawn=self.resumed.get(job.name))
        work = asyncio.ensure_future(call(actor, math.inf, RolloutWorker.roll_out, job))
        try:
            await self._limit_rollouts(actor, job.name, work)
            group = await work
        finally:
            work.cancel()
        self.resumed.pop(job.name, None)
        return group

    async def _limit_rollouts(self, actor: Actor, name: str, work: asyncio.Future[GroupRef]) -> None:
        """Return when the job is done. Raises `DeadlineError` if its rollouts do not end, or if the worker hangs."""
        limit_s, what = self.rollout_s + GRACE_S, f"{actor.name}: rollouts of group {name} (run.rollout_timeout_s)"
        with LEDGER.enter(what, limit_s) as wait:
            while not (await asyncio.wait({work}, timeout=limit_s))[0]:
                if await call(actor, GRACE_S, RolloutWorker.is_sampling, name) and not work.done():
                    await LEDGER.expire(wait)
                    raise DeadlineError(f"{what}: no end within {limit_s:g} s")
                wait.limit_s += limit_s

    async def snapshot(self) -> set[str]:
        """Mark the states of components, and store the turns of unfinished jobs for `write_turns`.

        Returns the names of the most recently finished jobs of each process, whose groups the states include.
        """
        found = await run_together(call(actor, self.write_s, RolloutWorker.snapshot) for actor in self.actors)
        finished = {name for snapshot in found for name in snapshot.finished}
        self.drawn.clear()
        self.drawn.update((name, turns) for name, turns in self.resumed.items() if name not in finished)
        for snapshot in found:
            self.drawn.update(snapshot.drawn)
        return finished

    async def write_turns(self, path: Path) -> None:
        """Write the turns of unfinished jobs at the last `snapshot`; no file if there are none."""
        if self.drawn:
            await call(self.actors[0], self.write_s, RolloutWorker.write_turns, path, dict(self.drawn))
            self.drawn.clear()

    async def write(self, path: Path, groups: tuple[GroupRef, ...], step: int) -> None:
        """Write complete groups into the sample store."""
        dropped = {group.id: group.dropped_by for group in groups if group.dropped_by}
        refs = [group.whole for group in groups]
        await call(self.actors[0], self.write_s, RolloutWorker.write, path, refs, step, dropped)

    async def mark(self) -> None:
        """Capture the current states of components for the next `save`."""
        await run_together(call(actor, self.write_s, RolloutWorker.mark) for actor in self.actors)

    async def save(self, folder: Path) -> None:
        """Write the states captured by `mark`, one file per process."""
        folder.mkdir()
        files = [folder / f"{index}.json" for index in range(len(self.actors))]
        given = zip(self.actors, files, strict=True)
        await run_together(call(actor, self.write_s, RolloutWorker.save, file) for actor, file in given)

    async def restore(self, folder: Path) -> None:
        """Restore the states. Process j modulo the current number of processes gets the file of process j."""
        then = len(list(folder.glob("*.json")))
        shares = [[folder / f"{j}.json" for j in range(i, then, len(self.actors))] for i in range(len(self.actors))]
        given = [(actor, files) for actor, files in zip(self.actors, shares, strict=True) if files]
        await run_together(call(actor, self.write_s, RolloutWorker.restore, files) for actor, files in given)

    async def close(self) -> None:
        """Stop the processes."""
        await asyncio.gather(*(actor.stop() for actor in self.actors))
