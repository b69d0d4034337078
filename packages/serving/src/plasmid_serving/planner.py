"""Plans weight syncs: which servers get the weights, and over which transport."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plasmid.errors import ConfigError
from plasmid.protocols import AdapterSync

from .supervisor import ManagedServer, for_each
from .weights.command import Transport, UpdateCommand
from .weights.errors import sync_failure
from .weights.sender import ServersWire

if TYPE_CHECKING:
    from plasmid.config.run import RunConfig

    from .settings import ServersConfig

ANSWER_S = 20.0
"""Time limit for a server to respond before a broadcast leaves it out, in seconds."""


class Planner:
    """Creates the wire of each weight sync."""

    def __init__(self, settings: ServersConfig, config: RunConfig, folder: Path, *, on_gpu: bool) -> None:
        """``folder`` holds the engine's files. Raises `ConfigError` if the configured transport is impossible."""
        self.transport, self.timeout_s = choose_transport(settings, config, on_gpu=on_gpu), config.run.sync_timeout_s
        self._settings, self._folder, self._trainer_ranks = settings, folder, config.placement.trainer_ranks
        self._flush_cache = settings.pause_mode != "in_place" or settings.recompute_kv
        self._backend = "nccl" if on_gpu else "gloo"
        self._count = self._restarts = 0
        """Number of syncs, and number of restarts of all servers at the last read-back."""
        self._adapter = settings.choose_sent_adapter(config, on_gpu=on_gpu)
        self._with_base: frozenset[str] = frozenset()
        """Servers that have received the base of the adapter."""
        self._group, self._members = "", tuple[str, ...]()
        self._first_ranks: dict[int, int] = {}

    async def plan(self, running: Sequence[ManagedServer]) -> ServersWire:
        """Plan a sync to the running servers. Raises `EngineLostError` if none can be reached."""
        is_broadcast = self.transport == "broadcast"
        if is_broadcast:
            await self._form_group(running)
        reached = [server for server in running if not is_broadcast or server.index in self._first_ranks]
        if not reached:
            raise sync_failure(())
        senders: Literal["first", "all", "divided"] = "first" if self._trainer_ranks == 1 else "divided"
        if self.transport == "ipc":
            senders = "all"
        token, ranks = secrets.token_hex(16), reached[0].connection.info.ranks
        command = UpdateCommand(
            transport=self.transport,
            token=token,
            ranks=ranks,
            senders=self._trainer_ranks if senders == "divided" else 1,
            verify=self._verifies(running),
            adapter=self._adapter_sync(reached),
            adapter_scale=self._adapter.scale if self._adapter is not None else 0.0,
            flush_cache=self._flush_cache,
            folder=str(self._folder / f"weights-{token}") if self.transport == "disk" else "",
            timeout_s=self.timeout_s,
        )
        if is_broadcast:
            command = replace(
                command, group=self._group, backend=self._backend, size=1 + ranks * len(self._first_ranks)
            )
        return ServersWire(
            command=command,
            addresses={server.index: server.connection.control for server in reached},
            first_ranks=dict(self._first_ranks),
            senders=senders,
        )

    def record(self, updated: Iterable[ManagedServer]) -> None:
        """Record the servers that completed a sync, and so have the base of an adapter."""
        if self._adapter is not None:
            self._with_base = frozenset(map(_incarnation, updated))

    def _adapter_sync(self, servers: Sequence[ManagedServer]) -> AdapterSync:
        if self._adapter is None:
            return "merged"
        known, self._with_base = self._with_base, frozenset()  # until `record`, no server is known to have the base
        return "alone" if known.issuperset(map(_incarnation, servers)) else "with_base"

    def _verifies(self, running: Sequence[ManagedServer]) -> bool:
        """Return whether this sync reads parameters back: the first, every k-th, and the one after a restart."""
        self._count += 1
        if not self._settings.read_back_every:
            return False
        restarts = sum(server.restarts for server in running)
        is_due = (self._count - 1) % self._settings.read_back_every == 0 or restarts != self._restarts
        if is_due:
            self._restarts = restarts
        return is_due

    async def _form_group(self, running: Sequence[ManagedServer]) -> None:
        """Keep the group while its members stay the same; else form a new one without servers that do not respond."""
        members = tuple(map(_incarnation, running))
        if members == self._members:
            return
        failed = await for_each(running, lambda server: server.connection.loads(timeout_s=ANSWER_S))
        answering = [server for server in running if server not in failed]
        self._first_ranks = {s.index: 1 + place * s.connection.info.ranks for place, s in enumerate(answering)}
        self._members = () if failed else members
        self._group = uuid.uuid4().hex


def _incarnation(server: ManagedServer) -> str:
    """Return a name of the server that changes when it is restarted."""
    return f"{server.name}.{server.restarts}"


def choose_transport(settings: ServersConfig, config: RunConfig, *, on_gpu: bool) -> Transport:
    """Return the transport of weights. Raises `ConfigError` if it is impossible."""
    place = config.placement
    transport: Transport
    if settings.urls:
        transport = "disk"
    elif settings.wire != "auto":
        transport = settings.wire
    elif not on_gpu:
        transport = "disk"
    else:
        transport = "ipc" if place.colocated else "broadcast"
    if transport == "ipc" and (not on_gpu or place.trainer_ranks < place.engine_ranks):
        raise ConfigError(
            'rollout.wire: "ipc" requires one trainer rank per engine rank, on the same GPU; '
            f"got {place.trainer_ranks} and {place.engine_ranks}; set another wire"
        )
    return transport
