"""Ctrl-C before a run starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process immediately, unless a run handles it.

    Python would raise `KeyboardInterrupt` at an arbitrary point, and libraries may swallow it during their import.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        # only the main thread may set a handler, and one that Python did not set cannot be put back
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: object) -> None:
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\n")  # a progress bar may have hidden the cursor
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
