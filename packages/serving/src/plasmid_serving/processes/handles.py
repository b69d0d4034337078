"""Handles with which the supervisor starts and stops servers: those of the run, in actors, and external ones."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Protocol

from plasmid.errors import PlasmidError
from plasmid.protocols import Actor, call

from ..api import ServerAddress
from ..connection import StartedServer
from ..dialect import Dialect
from ..weights.control import ControlServer
from .actor import ServerActor

STOP_S = 15.0


class ServerHandle(Protocol):
    """One server of the engine."""

    async def start(self, *, timeout_s: float) -> StartedServer:
        """Start the server, or restart it, regardless of its state. Raises `PlasmidError`."""

    async def exit_code(self, *, timeout_s: float) -> int | None:
        """Return the exit code of the server; None while it runs. Raises `PlasmidError` if it cannot be determined."""

    async def stop(self) -> None:
        """Stop the server."""


class OwnServer:
    """Implements `ServerHandle` for a server of the run, managed by a `ServerActor`."""

    def __init__(
        self, make: Callable[[], Awaitable[Actor]], before_loading: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """``make`` starts the actor. It is called again if the actor dies with its machine.

        The server loads its model after ``before_loading``, but starts and imports modules at once.
        """
        self._make, self._before_loading = make, before_loading
        self._actor: Actor | None = None

    async def start(self, *, timeout_s: float) -> StartedServer:
        actor, self._actor = self._actor, None
        if actor is not None:
            try:
                await call(actor, STOP_S, ServerActor.kill)
                self._actor = actor
            except PlasmidError:
                await actor.stop(grace_s=0.1)
        if self._actor is None:
            self._actor = await self._make()
        if self._before_loading is not None:
            await call(self._actor, timeout_s, ServerActor.prepare)
            await self._before_loading()
        return await call(self._actor, timeout_s, ServerActor.launch)

    async def exit_code(self, *, timeout_s: float) -> int | None:
        assert self._actor is not None
        return await call(self._actor, timeout_s, ServerActor.exit_code)

    async def stop(self) -> None:
        if self._actor is not None:
            await self._actor.stop()


class AttachedServer:
    """Implements `ServerHandle` for an external server, which is never started or stopped."""

    def __init__(self, dialect: Dialect, url: str, api_key: str) -> None:
        self._dialect, self._address, self._key = dialect, ServerAddress(url.rstrip("/")), api_key
        self._control = ControlServer(secrets.token_bytes(32))

    async def start(self, *, timeout_s: float) -> StartedServer:
        """Attach. Raises `EngineError` if the server has another model or cannot be updated."""
        api = self._address.open(self._key)
        try:
            info = await self._dialect.describe(api)
            await self._dialect.check_attached(api, info)
        finally:
            await api.close()
        return StartedServer(address=self._address, info=info, control=self._control.address)

    async def exit_code(self, *, timeout_s: float) -> int | None:
        """Return None, because the exit code is never known."""
        return None

    async def stop(self) -> None:
        self._control.close()
