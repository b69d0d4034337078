"""Worker processes that answer many calls in one fork, for work that never executes its input."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

from plasmid.errors import RaisedError
from plasmid.utils.messages import ConnectionClosedError, LateMessageError, MessageTooLongError
from plasmid.utils.work_clock import pause_work_clock

from .pool import ENDED, GRACE_S, Answer, Limits, WorkerPool, read_answer
from .worker import Work

MAX_BATCH = 64
"""Maximum number of calls sent to a worker at once."""


class BatchPool(WorkerPool):
    """A `WorkerPool` whose calls share forks: a worker takes a share of the waiting calls and answers them in order.

    Each call has its own deadline. If one hangs, crashes or exceeds its memory, only its own answer fails; a new fork
    continues with the calls after it. Work that executes its input belongs in a `WorkerPool`.
    """

    def __init__(self, work: Work, limits: Limits, *, workers: Literal["auto"] | int) -> None:
        super().__init__(work, limits, workers=workers)
        self._waiting: deque[tuple[bytes, Future[Answer]]] = deque()

    async def call(self, given: Any) -> Answer:
        """Make one call. Raises `RaisedError` with the work's exception, `IsolationError` if there is no process."""
        try:
            message = pickle.dumps(given)
        except RecursionError:  # arguments may come from policies
            return Answer(failed="too deeply nested")
        future: Future[Answer] = Future()
        self._waiting.append((message, future))
        self._threads.submit(self._answer_next)
        with pause_work_clock():  # waiting for earlier calls does not count; the pool has a deadline for each
            return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Stop all workers and cancel waiting calls."""
        super().close()
        with suppress(IndexError):
            while True:
                self._waiting.popleft()[1].cancel()

    def _answer_next(self) -> None:
        """Answer the next batch; do nothing if other threads took all waiting calls."""
        calls = self._next_batch()
        try:
            while calls:
                self._answer(calls)
        except Exception as error:  # noqa: BLE001  boundary: an error in a pool's thread is reported nowhere else
            for _, future in calls:
                future.set_exception(error)

    def _next_batch(self) -> deque[tuple[bytes, Future[Answer]]]:
        share = max(1, min(MAX_BATCH, -(-len(self._waiting) // self._num_workers)))
        calls: deque[tuple[bytes, Future[Answer]]] = deque()
        with suppress(IndexError):
            while len(calls) < share:
                call = self._waiting.popleft()
                if call[1].set_running_or_notify_cancel():
                    calls.append(call)
        return calls

    def _answer(self, calls: deque[tuple[bytes, Future[Answer]]]) -> None:
        """Answer calls until all are answered or the worker is gone. In that case the first call fails and the
        others remain."""
        worker = self._worker()
        try:
            worker.send(pickle.dumps([message for message, _ in calls]))
            while calls:
                # twice the deadline: a call that runs out of memory because of earlier ones is repeated
                answer = worker.receive(2 * self._limits.timeout_s + GRACE_S)
                _, future = calls.popleft()
                try:
                    future.set_result(read_answer(answer))
                except RaisedError as error:
                    future.set_exception(error)
        except (LateMessageError, ConnectionClosedError, MessageTooLongError):
            self._drop(worker)
            calls.popleft()[1].set_result(ENDED)
