"""Measure the time to compute a sample's score, excluding time in queues of thread pools and servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from .waiting import is_cancelling
from .waits.ledger import LEDGER

T = TypeVar("T")
P = ParamSpec("P")


class WorkClock:
    """Counts seconds of work between `start` and `stop`, except while a part of the work is in a queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._since: float | None = None
        self._started = False
        self._queued = 0

    def start(self) -> None:
        """Start counting."""
        with self._lock:
            self._started = True
            self._run()

    def stop(self) -> None:
        """Stop counting: the work is done, even if its result has not been delivered."""
        with self._lock:
            self._started = False
            self._run()

    def enter_queue(self) -> None:
        """Pause until `leave_queue`. Several parts of the work can be in queues at the same time."""
        with self._lock:
            self._queued += 1
            self._run()

    def leave_queue(self) -> None:
        """Continue counting, unless another part of the work is in a queue."""
        with self._lock:
            self._queued -= 1
            self._run()

    def seconds(self) -> float:
        """Return the seconds of work so far."""
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
    """Return the clocks of the work that the calling task belongs to."""
    return _CLOCKS.get()


def set_clocks(clocks: Sequence[Clocks]) -> None:
    """Make the calling task part of the work of other tasks, which wait for its result."""
    _CLOCKS.set(tuple({id(clock): clock for group in clocks for clock in group}.values()))


@contextmanager
def pause_work_clock() -> Iterator[None]:
    """Exclude the duration of the block from the work of the calling task."""
    place = _Place()
    try:
        yield
    finally:
        place.release()


class _Place:
    """A place in a queue: pauses the current clocks until `release`."""

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
    """A thread pool whose queueing time is not counted as work of the submitting task."""

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
        future.add_done_callback(lambda _: place.release())  # if it was cancelled in the queue
        return future


async def run_timed(work: Callable[[], Any], clock: WorkClock) -> Any:
    """Await ``work()`` under the clock.

    Converts `SystemExit`, which would stop the event loop, to `RuntimeError`, and so `CancelledError` of the work's own
    code, which would look like a cancellation of the caller.
    """
    _CLOCKS.set((*_CLOCKS.get(), clock))
    clock.start()
    try:
        return await work()
    except SystemExit as error:
        raise RuntimeError(f"exited with SystemExit({error.code!r})") from error
    except asyncio.CancelledError as error:
        if is_cancelling():
            raise
        raise RuntimeError("raised CancelledError, although the run did not cancel it") from error
    finally:
        clock.stop()


async def finish_within(limit_s: float, future: asyncio.Future[T], clock: WorkClock, what: str) -> T:
    """Return the future's result. Cancels it and raises `TimeoutError` when the clock reaches ``limit_s`` seconds.

    ``what`` names the wait in the process's ledger.
    """
    try:
        with LEDGER.enter(what, limit_s) as wait:
            while not future.done():
                left_s = limit_s - clock.seconds()
                if left_s <= 0:
                    await LEDGER.expire(wait)
                    raise TimeoutError
                await asyncio.wait({future}, timeout=left_s)
            return future.result()
    finally:
        future.cancel()
