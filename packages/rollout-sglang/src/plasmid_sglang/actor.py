"""What lives beside each server, on its machine: starts it, feeds it weights, ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plasmid.errors import EngineError, SyncError
from plasmid.protocols import Actor
from plasmid.types import SyncReceipt

from .api import Abilities, Api
from .followers import Followers
from .mail import Address, Office
from .process import Server, ServerOptions
from .receiving import Commands, Update
from .wire import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A server that answers."""

    url: str
    abilities: Abilities
    office: Address
    """Where mail of weight syncs is to be left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What can be seen of a server that may be too busy to answer."""

    exit_code: int | None
    """How it ended, or a part of it on another machine; None while all runs, or if nobody knows."""
    pulse: int | None
    """A number that grows while it takes weights over; None when it does not."""


class EngineServer:
    """One server. Methods are called by the driver and by trainer ranks; all may run at once."""

    def __init__(self, options: ServerOptions, followers: Sequence[Actor] = ()) -> None:
        self._options = options
        self._followers = Followers(followers)
        self._server = Server(options, self._followers)
        self._api: Api | None = None
        self._commands: Commands | None = None
        self._update: Update | None = None
        self._office = Office()

    async def start(self) -> Started:
        """Start the server, or start it anew. Raises `EngineError`."""
        await self._leave()
        url = await self._server.start()
        self._api = Api(url)
        abilities = await self._api.abilities()
        self._commands = Commands(self._api, abilities, self._office)
        return Started(url=url, abilities=abilities, office=self._office.address)

    @property
    def commands(self) -> Commands:
        """Of the running server. Raises `EngineError` if there is none."""
        if self._commands is None:
            raise EngineError(f"{self._options.name}: its server is not running")
        return self._commands

    async def look(self) -> Look:
        """How the server does, without asking it."""
        code = await self._exit_code()
        return Look(exit_code=code, pulse=None if self._update is None else self._update.pulse())

    async def _exit_code(self) -> int | None:
        code = self._server.exit_code()
        return code if code is not None else await self._followers.exit_code()

    async def receive(self, order: Order, version: int) -> SyncReceipt:
        """Take over what the trainer sends. Raises `SyncError`, also if that takes too long, and `EngineError`."""
        if self._update is not None:
            self._update.end(SyncError("it was replaced by a later one"))
        self._update = Update(self._commands, self._office, order, version)
        return await self._update.result()

    async def checksums(self, timeout_s: float) -> Mapping[str, int]:
        """Of every parameter of every process of the server."""
        await self.commands.begin()
        receipts = await self.commands.run("checksums", timeout_s=timeout_s)
        await self.commands.end()
        several = len(receipts) > 1
        return {
            f"{name}@{rank}" if several else name: value
            for rank, receipt in enumerate(receipts)
            for name, value in receipt["checksums"].items()
        }

    async def kill(self) -> None:
        """End the server at once."""
        await self._leave()
        await asyncio.to_thread(self._server.kill)
        await self._followers.kill()

    async def close(self) -> None:
        """End the server."""
        await self._leave()
        await self._server.stop()
        with contextlib.suppress(EngineError):  # they end with their actors, too
            await self._followers.kill()

    async def _leave(self) -> None:
        if self._update is not None:
            self._update.end(EngineError("the server was stopped"))
        self._update = self._commands = None
        if self._api is not None:
            await self._api.close()
            self._api = None


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
