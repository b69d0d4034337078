"""Completions on their way from the engine's thread to the clients that asked for them."""

from __future__ import annotations

import asyncio

from plasmid.types import Completion


class Mailboxes:
    """One box for each client. Lives on the actor's event loop; only `post` may be called from other threads."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[Completion]] = {}
        self._filled: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, client: str) -> None:
        """Make a box if there is none."""
        self._loop = asyncio.get_running_loop()
        if client not in self._boxes:
            self._boxes[client], self._filled[client] = [], asyncio.Event()

    def post(self, client: str, completion: Completion) -> None:
        """Put a completion into a box. From any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._put, client, completion)

    def _put(self, client: str, completion: Completion) -> None:
        self._boxes[client].append(completion)
        self._filled[client].set()

    async def collect(self, client: str, *, wait_s: float) -> list[Completion]:
        """Empty a box; waits for a first completion."""
        self.open(client)
        try:
            async with asyncio.timeout(wait_s):
                await self._filled[client].wait()
        except TimeoutError:
            return []
        found, self._boxes[client] = self._boxes[client], []
        self._filled[client].clear()
        return found
