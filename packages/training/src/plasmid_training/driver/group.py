"""Calls from the driver to all ranks of a model, with one error if some of them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from plasmid.errors import ActorDiedError, DeadlineError, PlasmidError
from plasmid.protocols import Actor

GRACE_S = 2.0
"""Seconds to wait for the errors of other ranks after one has failed, to find the cause."""
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class RankGroup:
    """Calls methods of ranks, given as ``Rank.train``, with arguments that mypy checks."""

    def __init__(self, actors: Sequence[Actor], *, timeout_s: float, name: str = "trainer") -> None:
        """``name`` stands for the ranks in errors."""
        self._actors, self._timeout_s, self._name = tuple(actors), timeout_s, name

    def with_timeout(self, timeout_s: float) -> RankGroup:
        """Return the same ranks with another timeout per call."""
        return RankGroup(self._actors, timeout_s=timeout_s, name=self._name)

    @overload
    async def call_first(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def call_first(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call_first(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of rank 0."""
        return await self._call(self._actors[0], method, *args, **kwargs)

    @overload
    async def call_all(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...
    @overload
    async def call_all(
        self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...
    async def call_all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every rank with the same arguments; return the results in rank order."""
        return await self._gather([self._call(actor, method, *args, **kwargs) for actor in self._actors])

    async def call_each(
        self,
        method: Callable[Concatenate[Any, A, P], R],
        values: Sequence[A],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call a method of every rank with its own first argument from ``values``; return results in rank order."""
        calls = zip(self._actors, values, strict=True)
        return await self._gather([self._call(actor, method, value, *args, **kwargs) for actor, value in calls])

    async def stop(self) -> None:
        """Stop all processes."""
        await asyncio.gather(*(actor.stop() for actor in self._actors))

    async def _call(self, actor: Actor, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await actor.call(method.__name__, *args, timeout_s=self._timeout_s, **kwargs)

    async def _gather(self, calls: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
        """Return all results. After one call fails, stop waiting for the others, which may be blocked by it."""
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
            rank = min(errors, key=lambda r: (_cause_order(errors[r]), r))
            raise self._name_rank(errors[rank], rank)
        return [task.result() for task in tasks]

    def _name_rank(self, error: BaseException, rank: int) -> BaseException:
        """Add the rank to the error's message if there are several ranks."""
        if len(self._actors) > 1 and isinstance(error, PlasmidError):
            error.args = (f"{self._name} rank {rank}: {error}",)
        return error


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _cause_order(error: BaseException) -> int:
    """Return a sort key, lowest for the likely cause: ranks whose peer died fail as well, or reach their deadline."""
    if isinstance(error, ActorDiedError):
        return 0
    if isinstance(error, DeadlineError):
        return 3
    return 1 if isinstance(error, PlasmidError) else 2
