"""Worker processes that answer many calls in one fork, for work that never executes what it is given."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from plasmid.errors import IsolationError
from plasmid.utils.messages import Closed, Late, TooLong
from plasmid.utils.work_clock import queued

from .pool import ENDED, GRACE_S, Answer, Limits, WorkerPool, read_answer
from .worker import Work

MAX_BATCH = 64
"""Calls that a worker is sent at once."""


class BatchPool(WorkerPool):
    """A `WorkerPool` whose calls share forks: a worker takes its part of those that wait, and answers them in order.

    Each call has its own deadline. One that hangs, crashes or takes too much memory costs its own answer; a new fork
    goes on with those after it. Work that executes what it is given belongs in a `WorkerPool`.
    """

    def __init__(self, work: Work, limits: Limits, *, workers: int) -> None:
        super().__init__(work, limits, workers=workers)
        self._num_workers = workers
        self._waiting: deque[tuple[bytes, Future[Answer]]] = deque()

    async def call(self, given: Any) -> Answer:
        """One call of the work. Raises `IsolationError` with what it raised."""
        try:
            message = pickle.dumps(given)
        except RecursionError:  # arguments come from policies, too
            return Answer(failed="too deeply nested")
        future: Future[Answer] = Future()
        self._waiting.append((message, future))
        self._threads.submit(self._answer_next)
        with queued():  # for the calls before it, too; the pool has a deadline for each
            return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Stop all workers; calls that still wait are cancelled."""
        super().close()
        with suppress(IndexError):
            while True:
                self._waiting.popleft()[1].cancel()

    def _answer_next(self) -> None:
        """Answer the next batch; nothing if other threads took all calls that waited."""
        calls = self._next_batch()
        try:
            while calls:
                self._answer(calls)
        except Exception as error:  # noqa: BLE001  boundary: an error in a pool's thread is seen by nobody else
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
        """Answer calls until all are, or the worker is gone: then the first one has failed, and the others are left."""
        worker = self._worker()
        try:
            worker.send(pickle.dumps([message for message, _ in calls]))
            while calls:
                # twice the deadline: a call that finds no memory left by those before it is done again
                answer = worker.receive(2 * self._limits.timeout_s + GRACE_S)
                _, future = calls.popleft()
                try:
                    future.set_result(read_answer(answer))
                except IsolationError as error:
                    future.set_exception(error)
        except (Late, Closed, TooLong):
            self._drop(worker)
            calls.popleft()[1].set_result(ENDED)
