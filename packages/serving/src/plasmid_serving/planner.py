"""Plans weight syncs: which servers get the weights and over which transport."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .supervisor import ManagedServer, for_each
from .weights.command import Transport, UpdateCommand
from .weights.errors import sync_failure
from .weights.sender import ServersWire

ANSWER_S = 20.0
"""Time for a server to answer before it is left out of a broadcast."""


@dataclass(slots=True, kw_only=True)
class Planner:
    """Makes the wire of each weight sync."""

    transport: Transport
    folder: Path
    """Of the engine's files in the run folder."""
    timeout_s: float
    read_back_every: int
    flush_cache: bool
    backend: str
    """Of broadcasts: nccl or gloo."""
    count: int = 0
    restarts: int = 0
    """Restarts of all servers when weights were last read back; a restarted server is verified again."""
    _group: str = field(default="", init=False)
    _members: tuple[str, ...] = field(default=(), init=False)
    _first_ranks: dict[int, int] = field(default_factory=dict, init=False)

    async def plan(self, running: Sequence[ManagedServer]) -> ServersWire:
        """Plan a sync to the running servers. Raises `EngineLostError` if none can be reached."""
        is_broadcast = self.transport == "broadcast"
        if is_broadcast:
            await self._form_group(running)
        reached = [server for server in running if not is_broadcast or server.index in self._first_ranks]
        if not reached:
            raise sync_failure(())
        token, ranks = secrets.token_hex(16), reached[0].connection.info.ranks
        command = UpdateCommand(
            transport=self.transport,
            token=token,
            ranks=ranks,
            verify=self._verifies(running),
            flush_cache=self.flush_cache,
            folder=str(self.folder / f"weights-{token}") if self.transport == "disk" else "",
            timeout_s=self.timeout_s,
        )
        if is_broadcast:
            command = replace(command, group=self._group, backend=self.backend, size=1 + ranks * len(self._first_ranks))
        return ServersWire(
            command=command,
            addresses={server.index: server.connection.control.address for server in reached},
            first_ranks=dict(self._first_ranks),
            senders="all" if self.transport == "ipc" else "first",
        )

    def _verifies(self, running: Sequence[ManagedServer]) -> bool:
        """Whether this sync reads parameters back: the first, every k-th, and the one after a restart."""
        self.count += 1
        if not self.read_back_every:
            return False
        restarts = sum(server.restarts for server in running)
        is_due = (self.count - 1) % self.read_back_every == 0 or restarts != self.restarts
        if is_due:
            self.restarts = restarts
        return is_due

    async def _form_group(self, running: Sequence[ManagedServer]) -> None:
        """Keep the group while its members are the same; else a new one, without servers that do not answer."""
        members = tuple(f"{server.name}.{server.restarts}" for server in running)
        if members == self._members:
            return
        failed = await for_each(running, lambda server: server.connection.loads(timeout_s=ANSWER_S))
        answering = [server for server in running if server not in failed]
        self._first_ranks = {s.index: 1 + place * s.connection.info.ranks for place, s in enumerate(answering)}
        self._members = () if failed else members
        self._group = uuid.uuid4().hex
