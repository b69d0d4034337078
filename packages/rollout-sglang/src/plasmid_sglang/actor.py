"""What lives beside each server, on its machine: starts it, holds its control channel, ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plasmid.errors import EngineError
from plasmid.protocols import Actor

from .api import Abilities, Api
from .control import ControlAddress, ControlServer
from .followers import Followers
from .process import Server, ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A server that answers."""

    url: str
    abilities: Abilities
    control: ControlAddress
    """Control channel of weight syncs."""


class EngineServer:
    """One server."""

    def __init__(self, options: ServerOptions, followers: Sequence[Actor] = ()) -> None:
        self._options = options
        self._followers = Followers(followers)
        self._server = Server(options, self._followers)
        self._control = ControlServer(options.control_key)

    async def start(self) -> Started:
        """Start the server, or start it anew. Raises `EngineError`."""
        url = await self._server.start()
        abilities = await abilities_at(url, self._options.api_key)
        return Started(url=url, abilities=abilities, control=self._control.address)

    async def exit_code(self) -> int | None:
        """How the server ended, or a part of it on another machine; None while all runs."""
        code = self._server.exit_code()
        return code if code is not None else await self._followers.exit_code()

    async def kill(self) -> None:
        """End the server at once."""
        await asyncio.to_thread(self._server.kill)
        await self._followers.kill()

    async def close(self) -> None:
        """End the server."""
        await self._server.stop()
        with contextlib.suppress(EngineError):  # they end with their actors, too
            await self._followers.kill()
        self._control.close()


async def abilities_at(url: str, key: str) -> Abilities:
    """What the server there knows. Raises `EngineError`."""
    api = Api(url, key)
    try:
        return await api.abilities()
    finally:
        await api.close()


class Follower:
    """The part of a server on another machine than its first. The first tells it what to do, and ends with it."""

    def __init__(self, options: ServerOptions) -> None:
        self._server = Server(options, Followers(()))

    async def start(self, meeting: Mapping[str, Any]) -> None:
        """Begin, or begin anew; returns at once."""
        await self.kill()
        self._server.follow(meeting)

    async def ended(self) -> str:
        """See `Server.ended`."""
        return self._server.ended()

    async def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._server.exit_code()

    async def kill(self) -> None:
        """End it."""
        await asyncio.to_thread(self._server.kill)

    async def close(self) -> None:
        """End it."""
        await self.kill()
