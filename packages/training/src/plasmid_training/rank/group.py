"""All ranks of a trainer as the driver sees them: called together, with one error when some of them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from plasmid.errors import ActorDiedError, DeadlineError, PlasmidError
from plasmid.protocols import Actor

from .calls import Rank

GRACE_S = 2.0
"""After one rank has failed: how long the others may take to say why it did."""
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class RankGroup:
    """Calls methods of `Rank`, named as ``Rank.train``, with arguments that mypy checks."""

    def __init__(self, actors: Sequence[Actor], *, timeout_s: float) -> None:
        self._actors, self._timeout_s = tuple(actors), timeout_s

    def within(self, timeout_s: float) -> RankGroup:
        """The same ranks with another limit for every call."""
        return RankGroup(self._actors, timeout_s=timeout_s)

    @overload
    async def first(
        self, method: Callable[Concatenate[Rank, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def first(self, method: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def first(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call rank 0."""
        return await self._call(self._actors[0], method, *args, **kwargs)

    @overload
    async def all(
        self, method: Callable[Concatenate[Rank, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...
    @overload
    async def all(self, method: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...
    async def all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call every rank with the same arguments; results in rank order."""
        return await self._gather([self._call(actor, method, *args, **kwargs) for actor in self._actors])

    async def each(
        self,
        method: Callable[Concatenate[Rank, A, P], R],
        values: Sequence[A],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call every rank with its own first argument, out of ``values``; results in rank order."""
        calls = zip(self._actors, values, strict=True)
        return await self._gather([self._call(actor, method, value, *args, **kwargs) for actor, value in calls])

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(actor.stop() for actor in self._actors))

    async def _call(self, actor: Actor, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await actor.call(method.__name__, *args, timeout_s=self._timeout_s, **kwargs)

    async def _gather(self, calls: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
        """Results of all. When one fails, the others, which wait for it, are not waited for."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
        errors = {rank: error for rank, task in enumerate(tasks) if task.done() and (error := _error(task))}
        if errors:
            rank = min(errors, key=lambda r: (_blame(errors[r]), r))
            raise self._named(errors[rank], rank)
        return [task.result() for task in tasks]

    def _named(self, error: BaseException, rank: int) -> BaseException:
        """The error, saying whose it is where there are several ranks."""
        if len(self._actors) > 1 and isinstance(error, PlasmidError):
            error.args = (f"trainer rank {rank}: {error}",)
        return error


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _blame(error: BaseException) -> int:
    """Causes before consequences: a rank whose peer is gone fails as well, or waits until its deadline."""
    if isinstance(error, ActorDiedError):
        return 0
    if isinstance(error, DeadlineError):
        return 3
    return 1 if isinstance(error, PlasmidError) else 2
