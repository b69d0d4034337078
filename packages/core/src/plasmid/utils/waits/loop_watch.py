"""Detect a blocked event loop, whose own deadlines cannot expire because nothing on it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from ...errors import EXIT_RETRY, DeadlineError, one_line
from ..printable import escape_unprintable
from ..safe_files import write_text
from .ledger import LEDGER
from .stacks import describe_process, locate

WAKE_SIGNAL = signal.SIGVTALRM
"""Interrupts a blocked call in the main thread. Nothing else uses this signal."""
POLL_S = 1.0
RESPONSE_S = 10.0
"""Maximum time until the loop responds after the blocked call was interrupted, in seconds."""


def end_process(error: str) -> NoReturn:
    """Print an error and end this process without cleanup, from a thread, as its event loop does not run."""
    sys.stderr.write(f"error: {escape_unprintable(error)}\n")
    sys.stderr.flush()
    os._exit(EXIT_RETRY)


class LoopWatch:
    """A context that ends calls which block the running event loop for longer than a limit.

    A thread writes the stacks into a file, then raises `DeadlineError` in the blocked call. Calls in C and in other
    threads cannot be interrupted: if the loop still does not respond, the thread ends the process.
    """

    def __init__(self, limit_s: float, setting: str, file: Path) -> None:
        """``setting`` is named in errors. A limit of 0 disables the watch."""
        self._limit_s, self._setting, self._file = limit_s, setting, file
        self._poll_s = min(POLL_S, limit_s / 4)
        self._responded, self._closed = threading.Event(), threading.Event()
        self._error: DeadlineError | None = None
        self._previous_handler: Any = None

    def __enter__(self) -> Self:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._limit_s:
            if self._is_main:
                self._previous_handler = signal.signal(WAKE_SIGNAL, self._on_signal)
            threading.Thread(target=self._watch, name="loop watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._limit_s and self._is_main:
            signal.signal(WAKE_SIGNAL, self._previous_handler)

    def _watch(self) -> None:
        """Poll the loop. Counts polls, not seconds, to ignore the time in which the process is stopped (SIGSTOP)."""
        blocked_s = 0.0
        self._responded.set()
        while not self._closed.wait(self._poll_s):
            if self._responded.is_set():
                blocked_s = 0.0
                self._ping()
            else:
                blocked_s += self._poll_s
            if blocked_s >= self._limit_s:
                self._interrupt()
                blocked_s = 0.0

    def _ping(self) -> None:
        self._responded.clear()
        self._loop.call_soon_threadsafe(self._responded.set)

    def _interrupt(self) -> None:
        error = DeadlineError(
            f"the driver's event loop was blocked for {self._limit_s:g} s ({self._setting}) in "
            f"{LEDGER.phase() or 'the start'}, at {locate(self._thread)}; stacks of its threads: {self._write_stacks()}"
        )
        if self._is_main:
            self._error = error
            signal.pthread_kill(self._thread, WAKE_SIGNAL)
            if self._responded.wait(RESPONSE_S):
                return
        end_process(str(error))

    def _write_stacks(self) -> str:
        try:
            self._file.parent.mkdir(exist_ok=True)
            write_text(self._file, f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{describe_process()}")
        except OSError as error:
            return f"not written: {one_line(error)}"
        return str(self._file)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
