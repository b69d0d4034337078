"""Supervision of an engine's servers: health checks, restarts, and which of them may serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from plasmid.errors import EngineError, PlasmidError, SyncError, one_line

from .connection import ServerConnection
from .processes.handles import ServerHandle
from .weights.command import UpdateCommand
from .weights.update import Update

if TYPE_CHECKING:
    from .settings import ServersConfig

log = logging.getLogger(__name__)
POLL_S = 0.2


class Condition(StrEnum):
    """State of a server."""

    SERVING = "serving"
    WAITING = "waiting"
    """It runs, and must get a complete set of weights before it may serve."""
    STARTING = "starting"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class ManagedServer:
    """One server."""

    index: int
    name: str
    handle: ServerHandle
    connection: ServerConnection
    condition: Condition = Condition.SERVING
    restarts: int = 0
    failures: int = 0
    """Consecutive health checks that failed."""
    current_update: Update | None = None
    heartbeats: int | None = None
    """Of the update, at the last health check."""
    error: str = ""
    """Why it was last given up."""

    @property
    def is_running(self) -> bool:
        """True if there is a server to talk to."""
        return self.condition in (Condition.SERVING, Condition.WAITING)

    async def restart(self, *, timeout_s: float) -> None:
        """Start the server again. Raises `PlasmidError`."""
        await self.connection.api.close()
        self.connection.open(await self.handle.start(timeout_s=timeout_s))

    def begin_update(self, command: UpdateCommand, version: int) -> Update:
        """Begin a weight update. Cancels an earlier one that has not completed."""
        if self.current_update is not None:
            self.current_update.cancel(SyncError("it was replaced by a later one"))
        self.current_update = Update(self.connection, command, version)
        return self.current_update


class Supervisor:
    """All servers of an engine. Calls ``changed`` whenever one begins or ceases to serve."""

    def __init__(
        self, servers: Sequence[ManagedServer], settings: ServersConfig, *, start_s: float, changed: Callable[[], None]
    ) -> None:
        """``start_s`` is the time limit of a restart."""
        self.all = tuple(servers)
        self.max_restarts = settings.max_restarts
        self._settings, self._start_s, self._changed = settings, start_s, changed
        self._tasks: set[asyncio.Task[None]] = set()
        self.has_synced = False
        """False before the first weight sync, when servers hold the weights of the model folder."""

    def begin(self) -> None:
        """Begin to check the health of every server."""
        for server in self.all:
            self._run(self._supervise(server))

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def serving(self) -> tuple[ManagedServer, ...]:
        """Servers that hold a proved version."""
        return tuple(s for s in self.all if s.condition is Condition.SERVING)

    def running(self) -> tuple[ManagedServer, ...]:
        """Servers that can take weights."""
        return tuple(s for s in self.all if s.is_running)

    async def await_running(self) -> None:
        """Wait until a server can take weights. Raises `EngineError` when too few are left."""
        self.check()
        if not self.running():
            log.warning("no server runs; waiting for one of those that are being started")
        while not self.running():
            await asyncio.sleep(POLL_S)
            self.check()

    def check(self) -> None:
        """Raises `EngineError` when too few servers are left."""
        gone = [s for s in self.all if s.condition is Condition.GONE]
        left = len(self.all) - len(gone)
        if left < self._settings.min_engines:
            errors = "; ".join(f"{s.name}: {s.error}" for s in gone)
            raise EngineError(
                f"{left} of {len(self.all)} servers are left, "
                f"rollout.min_engines is {self._settings.min_engines}; {errors}"
            )

    async def _supervise(self, server: ManagedServer) -> None:
        allowed = self._settings.health_failures
        while server.condition is not Condition.GONE:
            await asyncio.sleep(self._settings.health_interval_s)
            if not server.is_running:
                continue
            try:
                await self._check_health(server)
                server.failures = 0
            except PlasmidError as error:
                server.failures += 1
                log.warning("%s: look %d of %d failed: %s", server.name, server.failures, allowed, error)
                if server.failures >= allowed or isinstance(error, _ServerEndedError):
                    await self.give_up(server, one_line(error))

    async def _check_health(self, server: ManagedServer) -> None:
        """Raises `PlasmidError` if the server does not answer; at once if its process or actor has ended."""
        timeout_s = self._settings.health_timeout_s
        try:
            code = await server.handle.exit_code(timeout_s=timeout_s)
        except PlasmidError as error:
            raise _ServerEndedError(f"its actor is gone: {error}") from None
        if code is not None:
            raise _ServerEndedError(f"its server ended with code {code}")
        before = server.heartbeats
        server.heartbeats = None if server.current_update is None else await server.current_update.heartbeats()
        if server.heartbeats is not None and server.heartbeats != before:
            return  # it is taking weights, and would answer after the last
        await server.connection.loads(timeout_s=timeout_s)

    async def give_up(self, server: ManagedServer, error: str) -> None:
        """Take a server out of service, and restart it if it may be."""
        if not server.is_running:
            return
        server.condition, server.error = Condition.STARTING, error
        self._changed()
        log.warning("%s: given up: %s", server.name, error)
        self._run(self._restart(server))

    async def _restart(self, server: ManagedServer) -> None:
        while server.restarts < self.max_restarts:
            server.restarts += 1
            try:
                await server.restart(timeout_s=self._start_s)
            except PlasmidError as error:
                server.error = one_line(error)
                log.warning("%s: restart %d failed: %s", server.name, server.restarts, error)
                continue
            log.warning("%s: runs again after %d restarts", server.name, server.restarts)
            server.failures = 0
            server.condition = Condition.WAITING if self.has_synced else Condition.SERVING
            self._changed()
            return
        server.condition = Condition.GONE
        self._changed()

    async def each_running(self, action: Callable[[ManagedServer], Awaitable[Any]]) -> None:
        """Do something with every running server. Gives up those that fail."""
        for server, error in (await for_each(self.running(), action)).items():
            await self.give_up(server, str(error))

    async def stop(self) -> None:
        """Stop supervising and restarting."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop the servers."""
        for server in self.all:
            if server.current_update is not None:
                server.current_update.cancel(EngineError("the engine was closed"))
        await asyncio.gather(*(server.connection.api.close() for server in self.all))
        await asyncio.gather(*(server.handle.stop() for server in self.all))


class _ServerEndedError(EngineError):
    """The server has ended: further health checks are pointless."""


async def for_each(
    servers: Iterable[ManagedServer], action: Callable[[ManagedServer], Awaitable[Any]]
) -> dict[ManagedServer, PlasmidError]:
    """Do something with all servers at once. Returns the errors of those that failed."""
    servers = list(servers)
    results = await asyncio.gather(*map(action, servers), return_exceptions=True)
    failed = {}
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, PlasmidError):
            failed[server] = result
        elif isinstance(result, BaseException):
            raise result
    return failed
