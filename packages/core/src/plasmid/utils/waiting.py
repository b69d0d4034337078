"""Deadlines, concurrent waits, and calls in separate threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from ..errors import DeadlineError
from .waits.ledger import LEDGER, Wait

T = TypeVar("T")
P = ParamSpec("P")
GRACE = 1.25
"""Factor on deadlines that trainers and engines also enforce, so that their more specific errors come first."""
INNER_POLL_S, INNER_POLLS = 0.05, 60
"""Interval and number of polls for nested waits whose deadlines have passed as well."""


async def run_together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first  # outside of the except block, which would replace its cause


@asynccontextmanager
async def deadline(limit_s: float, what: str, *, missing: str = "end") -> AsyncIterator[None]:
    """Limit the duration of the block. Raises `DeadlineError`: ``<what>: no <missing> within <limit_s> s``.

    The wait is listed in the process's ledger, which reports it before the block is cancelled.
    """
    timeout, expiring = asyncio.timeout(None), set[asyncio.Task[None]]()
    loop = asyncio.get_running_loop()

    async def expire(wait: Wait) -> None:
        await LEDGER.expire(wait)
        for _ in range(INNER_POLLS):  # nested waits have more specific errors: let them end first
            if not LEDGER.has_missed_after(wait):
                break
            await asyncio.sleep(INNER_POLL_S)
        timeout.reschedule(loop.time())

    with LEDGER.enter(what, limit_s) as wait:
        try:
            async with timeout:
                timer = loop.call_later(limit_s, lambda: expiring.add(loop.create_task(expire(wait))))
                try:
                    yield
                finally:
                    timer.cancel()
                    for task in expiring:
                        task.cancel()
        except TimeoutError:
            if not timeout.expired():
                raise  # a TimeoutError of the block itself
            raise DeadlineError(f"{what}: no {missing} within {limit_s:g} s") from None
        if expiring:  # the block ended during the report, which continues stopped processes so that they write stacks
            raise DeadlineError(f"{what}: no {missing} within {limit_s:g} s")


async def wait_within(limit_s: float, what: str, work: Awaitable[T], *, missing: str = "end") -> T:
    """Await ``work`` with a `deadline` and return its result. Raises `DeadlineError`."""
    async with deadline(limit_s, what, missing=missing):
        return await work


def is_cancelling() -> bool:
    """Return True if the current task is being cancelled: a `CancelledError` is then not one of its own code."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def serve_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop in this thread until it is stopped, then cancel its tasks and close it."""
    loop.run_forever()
    loop.run_until_complete(_cancel_others())
    loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _OwnThread(Executor):
    """Runs each call in a separate daemon thread, which does not delay the exit of the process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # the thread starts immediately

        def work() -> None:
            try:
                result = fn(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  boundary: raised where it is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future


def run_in_thread(function: Callable[..., T], *args: Any, name: str) -> asyncio.Future[T]:
    """Call a function in a separate daemon thread. If it hangs, other calls and the process's exit are not blocked."""
    return asyncio.get_running_loop().run_in_executor(_OwnThread(name), lambda: function(*args))
