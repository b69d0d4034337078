"""Supervision of an engine's servers: health checks, restarts, and the set of servers that may get requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from plasmid.errors import EngineError, PlasmidError, SyncError, one_line
from plasmid.utils.waits.ledger import LEDGER, Wait

from .connection import ServerConnection
from .processes.handles import ServerHandle
from .processes.update import Update
from .weights.command import UpdateCommand

if TYPE_CHECKING:
    from .settings import ServersConfig

log = logging.getLogger(__name__)
POLL_S = 0.2


class Condition(StrEnum):
    """State of a server."""

    SERVING = "serving"
    WAITING = "waiting"
    """Running, but must receive the current weights before it gets requests."""
    STARTING = "starting"
    STOPPED = "stopped"
    """Not running, with no restarts left."""


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
    """Number of consecutive failed health checks."""
    current_update: Update | None = None
    heartbeats: int | None = None
    """Heartbeats of the update at the last health check."""
    error: str = ""
    """Reason why the server was last taken out of service."""

    @property
    def is_running(self) -> bool:
        """Return True if the server accepts connections."""
        return self.condition in (Condition.SERVING, Condition.WAITING)

    async def restart(self, *, timeout_s: float) -> None:
        """Restart the server. Raises `PlasmidError`."""
        api = self.connection.api
        await api.close()
        started = await self.handle.start(timeout_s=timeout_s)
        await api.close()  # calls in the meantime have connected again
        self.connection.open(started)

    def begin_update(self, command: UpdateCommand, version: int) -> Update:
        """Begin a weight update, and cancel the previous one if it is incomplete."""
        if self.current_update is not None:
            self.current_update.cancel(SyncError("replaced by a later one"))
        self.current_update = Update(self.connection, command, version)
        return self.current_update


class Supervisor:
    """Monitors and restarts the servers of an engine. Calls ``changed`` whenever one starts or stops serving."""

    def __init__(
        self, servers: Sequence[ManagedServer], settings: ServersConfig, *, start_s: float, changed: Callable[[], None]
    ) -> None:
        """``start_s`` is the time limit of a restart, in seconds."""
        self.all = tuple(servers)
        self.max_restarts = settings.max_restarts
        self._settings, self._start_s, self._changed = settings, start_s, changed
        self._tasks: set[asyncio.Task[None]] = set()
        self.has_synced = False
        """False until the first weight sync; until then, servers use the weights of the model folder."""

    def begin(self) -> None:
        """Start the health checks of every server."""
        for server in self.all:
            self._run(self._supervise(server))

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def list_serving(self) -> tuple[ManagedServer, ...]:
        """Return the servers that get requests; their weights are verified."""
        return tuple(s for s in self.all if s.condition is Condition.SERVING)

    def list_running(self) -> tuple[ManagedServer, ...]:
        """Return the servers that can receive weights."""
        return tuple(s for s in self.all if s.is_running)

    async def await_running(self) -> None:
        """Wait until a server can receive weights. Raises `EngineError` if too few are left."""
        self.check()
        if not self.list_running():
            log.warning("no server is running; waiting for a restart")
        while not self.list_running():
            await asyncio.sleep(POLL_S)
            self.check()

    def check(self) -> None:
        """Raise `EngineError` if too few servers are left."""
        stopped = [s for s in self.all if s.condition is Condition.STOPPED]
        left = len(self.all) - len(stopped)
        if left < self._settings.min_engines:
            errors = "; ".join(f"{s.name}: {s.error}" for s in stopped)
            raise EngineError(
                f"{left} of {len(self.all)} servers are running, but "
                f"rollout.min_engines = {self._settings.min_engines}; {errors}"
            )

    async def _supervise(self, server: ManagedServer) -> None:
        allowed = self._settings.health_failures
        while server.condition is not Condition.STOPPED:
            await asyncio.sleep(self._settings.health_interval_s)
            if not server.is_running:
                continue
            wait = Wait(f"{server.name}: health check (rollout.health_timeout_s)", self._settings.health_timeout_s)
            try:
                await self._check_health(server)
                server.failures = 0
            except PlasmidError as error:
                server.failures += 1
                log.warning(
                    "%s: health check failed (%d of at most %d): %s", server.name, server.failures, allowed, error
                )
                has_ended = isinstance(error, _ServerEndedError)
                if server.failures >= allowed or has_ended:
                    if not has_ended:
                        await LEDGER.expire(wait)  # the stacks of its processes, before it is restarted
                    await self.remove_from_service(server, one_line(error))

    async def _check_health(self, server: ManagedServer) -> None:
        """Raise `PlasmidError` if the server does not respond, or `_ServerEndedError` if its process or actor ended."""
        timeout_s = self._settings.health_timeout_s
        try:
            code = await server.handle.exit_code(timeout_s=timeout_s)
        except PlasmidError as error:
            raise _ServerEndedError(f"its actor has ended: {error}") from None
        if code is not None:
            raise _ServerEndedError(f"the server process exited with code {code}")
        before = server.heartbeats
        server.heartbeats = None if server.current_update is None else await server.current_update.heartbeats()
        if server.heartbeats is not None and server.heartbeats != before:
            return  # it is receiving weights and cannot respond until it has all of them
        await server.connection.loads(timeout_s=timeout_s)

    async def remove_from_service(self, server: ManagedServer, error: str) -> None:
        """Take a server out of service, and restart it if restarts are left."""
        if not server.is_running:
            return
        server.condition, server.error = Condition.STARTING, error
        self._changed()
        log.warning("%s: taken out of service: %s", server.name, error)
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
            log.warning("%s: running again after restart %d", server.name, server.restarts)
            server.failures = 0
            server.condition = Condition.WAITING if self.has_synced else Condition.SERVING
            self._changed()
            return
        server.condition = Condition.STOPPED
        self._changed()

    async def call_running(self, action: Callable[[ManagedServer], Awaitable[Any]]) -> None:
        """Run an action on every running server, and take servers that fail out of service."""
        for server, error in (await for_each(self.list_running(), action)).items():
            await self.remove_from_service(server, str(error))

    async def stop(self) -> None:
        """Stop health checks and restarts."""
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
    """The server has ended, so it is restarted without further health checks."""


async def for_each(
    servers: Iterable[ManagedServer], action: Callable[[ManagedServer], Awaitable[Any]]
) -> dict[ManagedServer, PlasmidError]:
    """Run an action on all servers concurrently. Returns the errors of those that failed."""
    servers = list(servers)
    results = await asyncio.gather(*map(action, servers), return_exceptions=True)
    failed = {}
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, PlasmidError):
            failed[server] = result
        elif isinstance(result, BaseException):
            raise result
    return failed
