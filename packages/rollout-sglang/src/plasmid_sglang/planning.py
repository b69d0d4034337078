"""How the next version gets to the servers that run now."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .lost import lost
from .members import Member, each
from .receiving import Order
from .wire import Kind, Meeting, SGLangWire

OPEN_S = 60.0


@dataclass(slots=True, kw_only=True)
class Planner:
    """Makes a wire for each weight sync."""

    kind: Kind
    folder: Path
    """Of the run's files that are the engine's."""
    timeout_s: float
    read_back_every: int
    flush_cache: bool
    on_gpu: bool
    count: int = 0
    restarts: int = 0
    """Of all servers, when weights were last read back: one that was started anew is proved again."""
    meeting: Meeting | None = field(default=None, init=False)
    members: tuple[str, ...] = field(default=(), init=False)

    async def plan(self, running: Sequence[Member]) -> SGLangWire:
        """Get the servers ready and say how to reach them. Raises `EngineLostError` if there is none."""
        token = uuid.uuid4().hex
        ranks = running[0].abilities.ranks if running else 1
        ipc = self.kind == "ipc"
        # version is of no use to the plan: the loop names it to sender and receiver
        order = Order(
            token=token,
            senders=ranks if ipc else 1,
            verify=self._is_due(running),
            flush_cache=self.flush_cache,
            timeout_s=self.timeout_s,
        )

        async def open_update(member: Member) -> None:
            await member.actor.call("open_update", order, timeout_s=OPEN_S)

        failed = await each(running, open_update)
        ready = [member for member in running if member not in failed]
        if not ready:
            raise lost(failed.values())
        return SGLangWire(
            kind=self.kind,
            actors=tuple(member.actor for member in ready),
            token=token,
            timeout_s=self.timeout_s,
            senders="all" if ipc else "first",
            folder=self.folder / f"weights-{token}" if self.kind == "disk" else None,
            meeting=self._meet(ready) if self.kind == "broadcast" else None,
            ranks_per_engine=ranks,
        )

    def _is_due(self, running: Sequence[Member]) -> bool:
        """Whether parameters are read back this time: every k-th, the first, and after a restart."""
        self.count += 1
        restarts = sum(member.restarts for member in running)
        due = (self.count - 1) % self.read_back_every == 0 if self.read_back_every else False
        if self.read_back_every and restarts != self.restarts:
            due = True
        if due:
            self.restarts = restarts
        return due

    def _meet(self, ready: Sequence[Member]) -> Meeting:
        """The same meeting as last time if the members are the same."""
        names = tuple(f"{member.name}.{member.restarts}" for member in ready)
        if self.meeting is None or names != self.members:
            first, firsts = 1, []
            for member in ready:
                firsts.append(first)
                first += member.abilities.ranks
            self.members = names
            self.meeting = Meeting(
                name=uuid.uuid4().hex,
                backend="nccl" if self.on_gpu else "gloo",
                first_ranks=tuple(firsts),
                size=first,
            )
        return self.meeting
