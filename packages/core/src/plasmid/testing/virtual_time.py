"""An event loop whose clock jumps to the next timer: hours of waiting in milliseconds, and deadlocks that are found."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(Exception):
    """Everybody waits and no timer is set: nothing can ever happen again."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`. Raises `DeadlockError`. Code that waits for threads or sockets cannot run in it."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Seconds since the loop was made, as its timers count them."""
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: what the loop would have waited is added to its clock."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("every task waits and no timer is set")
        ready = super().select(0)
        if not ready and timeout > 0:
            self._jump(timeout)
        return ready
