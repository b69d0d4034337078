"""A lock that is acquired in the order of the draws, however long the rollouts take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class OrderedLock:
    """Admits one job at a time, each after its predecessor; jobs without a predecessor in any order."""

    def __init__(self) -> None:
        self._ended: set[str] = set()
        """Jobs that have released the lock and whose successor has not asked for it yet."""
        self._waiting: dict[str, asyncio.Event] = {}
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def hold(self, name: str, *, after: str) -> AsyncIterator[None]:
        """Hold the lock for the job ``name`` once the job ``after`` has released it; at once if that is empty."""
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
