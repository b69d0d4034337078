"""Ctrl-C and SIGTERM before a run starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells, and after SIGTERM."""


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process immediately, unless a run handles them.

    Python would raise `KeyboardInterrupt` at an arbitrary point, and libraries may swallow it during their import.
    """
    with ExitStack() as handlers:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set a handler
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                if before is not None:  # a handler that Python did not set cannot be put back
                    signal.signal(number, _end)
                    handlers.callback(signal.signal, number, before)
        yield


def _end(number: int, frame: object) -> None:
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\n")  # a progress bar may have hidden the cursor
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
