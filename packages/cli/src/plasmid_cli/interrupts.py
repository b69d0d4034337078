"""Ctrl-C and SIGTERM before a run starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells, and after SIGTERM."""
_ENDING = threading.Lock()


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process immediately, unless a run handles them.

    Python would raise `KeyboardInterrupt` at an arbitrary point, and libraries may swallow it during their import.
    """
    with ExitStack() as handlers:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set a handler
            handlers.enter_context(_watch_signals())
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before is not None:  # a handler that Python did not set cannot be put back
                    signal.signal(number, _end)
                    handlers.callback(signal.signal, number, before)
        yield


@contextmanager
def _watch_signals() -> Iterator[None]:
    """Call `_end` from a thread, because the main thread runs no handler in a call to C, such as Ray's start.

    An event loop that handles signals replaces the pipe by its own.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        with open(reader, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] in SIGNALS and signal.getsignal(number[0]) is _end:
                    _end(number[0], None)

    threading.Thread(target=watch, name="interrupts", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def _end(number: int, frame: object) -> None:
    if not _ENDING.acquire(blocking=False):
        return  # the other of main thread and watching thread is ending the process
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\n")  # a progress bar may have hidden the cursor
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
