"""Connections of agents: limits their number, and closes idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

MAX_CONNECTIONS = 4096
IDLE_S = 120.0
"""Time after which an idle connection is closed, in seconds; requests may take as long as their turns do."""
NO_DESCRIPTOR_S = 0.1
"""Pause after the process runs out of file descriptors, in seconds."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connections:
    """The open connections of a server. If there are too many, the one that has been idle the longest is closed."""

    def __init__(self, *, max_connections: int = MAX_CONNECTIONS, idle_s: float = IDLE_S) -> None:
        self._max_connections, self._idle_s = max_connections, idle_s
        self._idle_since: dict[RequestHandler, float] = {}
        """Connections without a request, longest idle first."""
        self._busy: set[RequestHandler] = set()
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def listen(self, host: str, server: Callable[[], RequestHandler]) -> int:
        """Accept connections on a free port of a host, and return the port. Raises `OSError`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=self._max_connections)
        self._listener.setblocking(False)
        self._tasks = [asyncio.create_task(self._accept(server)), asyncio.create_task(self._close_idle())]
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        """Stop accepting connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    @web.middleware
    async def track_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Mark a connection as busy while one of its requests is handled (middleware)."""
        connection = request.protocol
        self._idle_since.pop(connection, None)
        self._busy.add(connection)
        try:
            return await handler(request)
        finally:
            self._busy.discard(connection)
            self._idle_since[connection] = time.monotonic()

    async def _accept(self, server: Callable[[], RequestHandler]) -> None:
        assert self._listener is not None, "call listen first"
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
                if not self._free_connection():
                    accepted.close()
                    continue
                _, connection = await loop.connect_accepted_socket(server, accepted)
            except OSError:  # out of descriptors, or the peer has disconnected
                await asyncio.sleep(NO_DESCRIPTOR_S)
                continue
            self._idle_since[connection] = time.monotonic()

    def _free_connection(self) -> bool:
        """Close the longest idle connection if there are too many. Returns False if all are busy."""
        self._forget_closed()
        if len(self._idle_since) + len(self._busy) < self._max_connections:
            return True
        longest = next(iter(self._idle_since), None)
        if longest is not None:
            self._end(longest)
        return longest is not None

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(self._idle_s / 4)
            self._forget_closed()
            limit = time.monotonic() - self._idle_s
            for connection in [one for one, since in self._idle_since.items() if since < limit]:
                self._end(connection)

    def _end(self, connection: RequestHandler) -> None:
        del self._idle_since[connection]
        transport = connection.transport
        if transport is not None:
            with contextlib.suppress(OSError):
                transport.abort()

    def _forget_closed(self) -> None:
        for connection in [one for one in self._idle_since if not one.connected]:
            del self._idle_since[connection]
