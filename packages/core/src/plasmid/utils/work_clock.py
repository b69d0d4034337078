"""How long a sample's score takes to compute: time in the queue of a thread pool or of a server does not count."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class WorkClock:
    """Counts seconds of work: not before `start`, and not while a part of the work is in a queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._since: float | None = None
        self._started = False
        self._queued = 0

    def start(self) -> None:
        """Begin to count."""
        with self._lock:
            self._started = True
            self._run()

    def stop(self) -> None:
        """Count no more: the work is done, though its result may still be on its way."""
        with self._lock:
            self._started = False
            self._run()

    def enter_queue(self) -> None:
        """Stand still until `leave_queue`. Parts of the work may be in queues at the same time."""
        with self._lock:
            self._queued += 1
            self._run()

    def leave_queue(self) -> None:
        """Go on, if nothing else of the work is in a queue."""
        with self._lock:
            self._queued -= 1
            self._run()

    def seconds(self) -> float:
        """Seconds of work so far."""
        with self._lock:
            return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    def _run(self) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._seconds += now - self._since
        self._since = now if self._started and not self._queued else None


Clocks = tuple[WorkClock, ...]
_CLOCKS: ContextVar[Clocks] = ContextVar("work_clocks", default=())


def current_clocks() -> Clocks:
    """Clocks of the work that the calling task belongs to."""
    return _CLOCKS.get()


def set_clocks(clocks: Sequence[Clocks]) -> None:
    """Make the calling task part of the work of several others, which wait for its result."""
    _CLOCKS.set(tuple({id(clock): clock for group in clocks for clock in group}.values()))


@contextmanager
def queued() -> Iterator[None]:
    """Do not count the time of the block as work of the calling task."""
    place = _Place()
    try:
        yield
    finally:
        place.release()


class _Place:
    """A place in a queue, from its making until `release`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks = current_clocks()
        for clock in self._clocks:
            clock.enter_queue()

    def release(self) -> None:
        with self._lock:
            clocks, self._clocks = self._clocks, ()
        for clock in clocks:
            clock.leave_queue()


class QueueingExecutor(ThreadPoolExecutor):
    """A thread pool whose queue is not counted as work of those who submit to it."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        place = _Place()

        def work() -> T:
            place.release()
            return fn(*args, **kwargs)

        try:
            future = super().submit(work)
        except BaseException:
            place.release()
            raise
        future.add_done_callback(lambda _: place.release())  # it was cancelled in the queue
        return future


async def timed(work: Callable[[], Any], clock: WorkClock) -> Any:
    """Await ``work()`` under the clock."""
    _CLOCKS.set((*_CLOCKS.get(), clock))
    clock.start()
    try:
        return await work()
    finally:
        clock.stop()


async def finish_within(limit_s: float, future: asyncio.Future[T], clock: WorkClock) -> T:
    """The future's result. Cancels it and raises `TimeoutError` once the clock has counted ``limit_s`` seconds."""
    try:
        while not future.done():
            left_s = limit_s - clock.seconds()
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait({future}, timeout=left_s)
        return future.result()
    finally:
        future.cancel()
