"""Waiting for several things, or not longer than for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from ..errors import DeadlineError

T = TypeVar("T")
GRACE = 1.25
"""Factor on deadlines that trainers and engines keep themselves: their own errors say more, and come first."""


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, in their order. The first that fails ends the others, and its error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first  # out here, so that it keeps its own cause


@asynccontextmanager
async def deadline(limit_s: float, what: str) -> AsyncIterator[None]:
    """Raises `DeadlineError` that says ``what`` took longer than this many seconds."""
    timeout = asyncio.timeout(limit_s)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise  # one of the work's own
        raise DeadlineError(f"{what}: no end within {limit_s:g} s") from None


async def within(limit_s: float, what: str, work: Awaitable[T]) -> T:
    """The result of ``work``. Raises `DeadlineError` as `deadline` does."""
    async with deadline(limit_s, what):
        return await work
