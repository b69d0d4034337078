"""An event loop with a virtual clock that jumps to the next timer. Skips waiting times and detects deadlocks."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")
THREAD_S = 60.0
"""Maximum real time to wait for calls in threads, in seconds; a call that takes longer counts as a deadlock."""


class DeadlockError(Exception):
    """All tasks wait and no timer is set, or a call in a thread does not end."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, on a virtual clock. Raises `DeadlockError`.

    The clock stops while calls of `asyncio.to_thread` and `loop.run_in_executor` are awaited. Code that waits for other
    threads, processes or sockets is not supported.
    """
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        self._in_threads: set[object] = set()
        super().__init__(_JumpingSelector(self._jump, self._in_threads))

    def time(self) -> float:
        """Return the virtual time since the loop was created, in seconds."""
        return self._now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._in_threads.add(future)
        future.add_done_callback(self._in_threads.discard)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        end = object()
        self._in_threads.add(end)  # asyncio joins the executor's threads in another thread
        try:
            await super().shutdown_default_executor()
        finally:
            self._in_threads.discard(end)

    def _jump(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.SelectSelector):
    """Waits only for threads; other waiting times of the loop are added to its clock."""

    def __init__(self, jump: Callable[[float], None], in_threads: set[object]) -> None:
        super().__init__()
        self._jump, self._in_threads = jump, in_threads

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        waits = timeout is None or timeout > 0
        if waits and self._in_threads:
            if not (ready := super().select(THREAD_S)):
                raise DeadlockError(f"a call in a thread did not end within {THREAD_S:g} s")
            return ready
        if timeout is None:
            raise DeadlockError("every task waits and no timer is set")
        ready = super().select(0)
        if not ready and waits:
            self._jump(timeout)
        return ready
