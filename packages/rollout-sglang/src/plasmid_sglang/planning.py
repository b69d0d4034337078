"""How the next version gets to the servers that run now."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .lost import lost
from .members import Member, each
from .transport import Kind
from .wire import Meeting, Order, SGLangWire

ANSWER_S = 20.0
"""Longest time for a server to show that it will come to a meeting."""


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
        """Say how to reach the servers. Raises `EngineLostError` if there is none."""
        meeting = await self._meet(running) if self.kind == "broadcast" else None
        reached = [member for member in running if meeting is None or member.index in meeting.first_ranks]
        if not reached:
            raise lost(())
        token = secrets.token_hex(16)
        return SGLangWire(
            kind=self.kind,
            order=Order(
                token=token,
                ranks=reached[0].abilities.ranks,
                verify=self._is_due(running),
                flush_cache=self.flush_cache,
                folder=self.folder / f"weights-{token}" if self.kind == "disk" else None,
                timeout_s=self.timeout_s,
            ),
            addresses={member.index: member.control for member in reached},
            senders="all" if self.kind == "ipc" else "first",
            meeting=meeting,
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

    async def _meet(self, running: Sequence[Member]) -> Meeting:
        """The same meeting as last time if the members are the same. One that does not come would hold a new one up."""
        names = tuple(f"{member.name}.{member.restarts}" for member in running)
        if self.meeting is None or names != self.members:
            failed = await each(running, _ask)
            first, firsts = 1, {}
            for member in (member for member in running if member not in failed):
                firsts[member.index] = first
                first += member.abilities.ranks
            self.members = names if not failed else ()
            self.meeting = Meeting(
                name=uuid.uuid4().hex,
                backend="nccl" if self.on_gpu else "gloo",
                first_ranks=firsts,
                size=first,
            )
        return self.meeting


async def _ask(member: Member) -> None:
    await member.api.loads(timeout_s=ANSWER_S)
