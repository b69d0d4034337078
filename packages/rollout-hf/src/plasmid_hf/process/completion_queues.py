"""Completions on their way from the engine's thread to the clients that asked for them."""

from __future__ import annotations

import asyncio

from plasmid.types import Completion


class CompletionQueues:
    """One queue for each client. Lives on the actor's event loop; only `put` may be called from other threads."""

    def __init__(self) -> None:
        self._queues: dict[str, list[Completion]] = {}
        self._has_completions: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, client: str) -> None:
        """Create the queue of a client unless it exists."""
        self._loop = asyncio.get_running_loop()
        if client not in self._queues:
            self._queues[client], self._has_completions[client] = [], asyncio.Event()

    def put(self, client: str, completion: Completion) -> None:
        """Put a completion into the queue of a client. Thread-safe."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._append, client, completion)

    def _append(self, client: str, completion: Completion) -> None:
        self._queues[client].append(completion)
        self._has_completions[client].set()

    async def collect(self, client: str, *, wait_s: float) -> list[Completion]:
        """Take everything out of the queue of a client; waits for a first completion."""
        self.open(client)
        try:
            async with asyncio.timeout(wait_s):
                await self._has_completions[client].wait()
        except TimeoutError:
            return []
        found, self._queues[client] = self._queues[client], []
        self._has_completions[client].clear()
        return found
