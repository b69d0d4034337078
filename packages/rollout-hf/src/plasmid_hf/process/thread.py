"""The thread that owns a model. It runs engine steps and, between them, functions submitted by other threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from plasmid.errors import EngineError

if TYPE_CHECKING:
    from .core import EngineCore

log = logging.getLogger(__name__)


class EngineThread:
    """Runs ``make()`` and then its steps in its own thread; `submit` runs a function there between two steps."""

    def __init__(self, make: Callable[[], EngineCore], *, num_threads: int, on_failure: Callable[[str], None]) -> None:
        self._make = make
        self._num_threads = num_threads
        self._on_failure = on_failure
        self._queue: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wakened = threading.Condition()
        self._closed = False
        self.failure = ""
        """Reason why the thread ended; empty while it runs."""
        self.started: Future[None] = Future()
        """Done when ``make()`` has returned; holds its exception if it raised one."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run a function between two steps. If it returns a future, wait for that, too."""
        answer: Future[Any] = Future()
        with self._wakened:
            if self.failure or self._closed:
                answer.set_exception(EngineError(f"the engine has stopped: {self.failure or 'it was closed'}"))
            else:
                self._queue.append((work, answer))
                self._wakened.notify()
        return answer

    def close(self) -> None:
        """End the thread after the current step."""
        with self._wakened:
            self._closed = True
            self._wakened.notify()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        try:
            import torch  # here, because callers import this module for its methods, without torch

            torch.set_num_threads(self._num_threads)  # applies to this thread only
            core = self._make()
            self.started.set_result(None)
            with torch.inference_mode():
                self._drive(core)
        except Exception as error:  # waiting callers get the error
            if not self.started.done():
                self.started.set_exception(error)
            else:
                log.exception("the engine failed")
                self._fail(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    def _drive(self, core: EngineCore) -> None:
        while not self._closed:
            self._run_queue()
            wait_s = core.generator.expire()
            if not core.step():
                with self._wakened:
                    if not self._queue and not self._closed:
                        self._wakened.wait(wait_s)

    def _run_queue(self) -> None:
        while self._queue:
            work, answer = self._queue.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                _set_result(answer, work())
            except Exception as error:  # noqa: BLE001  boundary: the caller gets the error, and the thread continues
                answer.set_exception(error)

    def _fail(self, failure: str) -> None:
        with self._wakened:
            self.failure = failure
            queue, self._queue = self._queue, deque()
        for _, answer in queue:
            answer.set_exception(EngineError(f"the engine has stopped: {failure}"))
        self._on_failure(failure)


def _set_result(answer: Future[Any], result: Any) -> None:
    if not isinstance(result, Future):
        answer.set_result(result)
        return

    def copy(done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(done.result())

    result.add_done_callback(copy)
