"""Calls of data sources in a thread, because rendering and tokenizing one row can take seconds."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from plasmid.components import PromptStream

log = logging.getLogger(__name__)
CLOSE_S = 5.0
"""Maximum time to wait for a running call when the data source is closed, in seconds."""
T = TypeVar("T")


class DataCalls(Protocol):
    """Runs calls of data sources, in the order in which they are submitted."""

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Schedule a call, and return a future of its result."""


class DirectCalls:
    """Runs each call immediately, for data that is read before an event loop exists."""

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        _run(call, future)
        return future


class DataThread:
    """Runs calls one at a time in a single thread, so that draws keep their order.

    It is a daemon thread, so a source that never returns does not delay Ctrl-C or the end of the process. Leaving the
    context ends the thread after all submitted calls.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="data", daemon=True).start()

    def __enter__(self) -> DataThread:
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.put(None)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((call, future))  # type: ignore[arg-type]
        return future

    def close(self, stream: PromptStream) -> None:
        """Close a stream after all submitted calls."""
        try:
            self.submit(stream.close).result(CLOSE_S)
        except TimeoutError:
            log.warning("data: a row is still being read after %g s; the source is not closed", CLOSE_S)

    def _work(self) -> None:
        while (submitted := self._calls.get()) is not None:
            call, future = submitted
            if future.set_running_or_notify_cancel():
                _run(call, future)
            del submitted, call, future  # free the data while the thread waits for the next call


async def await_outcome(future: Future[T]) -> T:
    """Wait for a submitted call. Cancellation drops a call that has not started; a running one continues."""
    return future.result() if future.done() else await asyncio.wrap_future(future)


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        result = call()
    except StopIteration as error:  # asyncio futures reject it, and the run would wait forever
        stopped = RuntimeError("the data source raised StopIteration")
        stopped.__cause__ = error
        future.set_exception(stopped)
    except BaseException as error:  # noqa: BLE001 - boundary: raised where the outcome is awaited
        future.set_exception(error)
    else:
        future.set_result(result)
