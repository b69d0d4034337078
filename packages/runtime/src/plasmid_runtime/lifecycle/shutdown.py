"""Ctrl-C and SIGTERM, and closing what a run has opened."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context in which signals end the task that entered it, in good order.

    While the run can be saved (`save_with`), the first signal asks it to; every other signal cancels the task, so that
    what has been started is stopped on the way out. Outside the main thread somebody else handles signals.
    """

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()
        for number in SIGNALS:
            before = signal.getsignal(number)
            try:
                loop.add_signal_handler(number, self._received)
            except (ValueError, RuntimeError):
                break
            self._before[number] = before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def save_with(self, stop: Callable[[], None] | None) -> None:
        """What the first signal is to call from now on; None if it is too early or too late to save anything."""
        self._stop = stop

    def _received(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            log.warning("stopping: saving the run; press Ctrl-C again to quit without")
            stop()
        elif self._task is not None:
            log.warning("stopping: ending the processes of the run")
            self._task.cancel()


class LoggingExitStack(contextlib.AsyncExitStack):
    """Closes what was opened, last first. What fails to close is logged, and the others are closed all the same."""

    def add_close(self, what: str, close: Callable[[], Any]) -> None:
        """Call ``close``, a function or coroutine function, at the end."""

        async def guarded() -> None:
            try:
                result = close()
                if inspect.isawaitable(result):
                    await result
            except Exception:  # boundary: trackers and data sources are users' code
                log.exception("%s did not close", what)

        self.push_async_callback(guarded)
