"""Judging in the order of the draws, however long the rollouts take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class OrderedLock:
    """Lets jobs in one by one, each after the one that was dealt out before it. Jobs without one come as they come."""

    def __init__(self) -> None:
        self._ended: set[str] = set()
        """Jobs that have ended and whose successor has not come yet."""
        self._waiting: dict[str, asyncio.Event] = {}
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def hold(self, name: str, *, after: str) -> AsyncIterator[None]:
        """The turn of the job ``name``, which comes when the job ``after`` has ended; at once if that is empty."""
        if after and after not in self._ended:
            await self._waiting.setdefault(after, asyncio.Event()).wait()
        self._ended.discard(after)
        self._waiting.pop(after, None)
        try:
            async with self._one:
                yield
        finally:
            if name in self._waiting:
                self._waiting[name].set()
            else:
                self._ended.add(name)
