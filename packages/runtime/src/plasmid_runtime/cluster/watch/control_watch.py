"""End the driver when Ray's control process is lost and a call of Ray blocks the driver's event loop.

Such a call cannot be interrupted, and Ray ends the process after 60 s with exit code 1.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from plasmid.utils.waits.loop_watch import end_process

POLL_S = 0.5
BLOCKED_S = 5.0
"""Maximum time for which the event loop may be blocked after the loss, in seconds. A loop that is not blocked ends the
run itself."""
STOP_S = 10.0
"""Maximum time to stop the processes of the run, in seconds."""


class ControlWatch:
    """A thread that ends this process. It counts polls, not seconds, because a stopped driver does not poll."""

    def __init__(self, describe_loss: Callable[[], str], stop_processes: Callable[[], None]) -> None:
        """``describe_loss`` returns an empty string while the control process runs. Needs a running event loop."""
        self._describe_loss, self._stop_processes = describe_loss, stop_processes
        self._loop = asyncio.get_running_loop()
        self._ran, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="control watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching. Call it before `ray.shutdown`, which ends the control process of a private cluster."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            loss = self._describe_loss()
            if loss and not self._is_loop_running():
                # in a thread, because `_stop_processes` calls Ray, which may block as well
                stopper = threading.Thread(target=self._stop_processes, daemon=True)
                stopper.start()
                stopper.join(STOP_S)
                end_process(loss)

    def _is_loop_running(self) -> bool:
        """Return True if the loop runs a callback within `BLOCKED_S`, or if the watch or the loop has been closed."""
        self._ran.clear()
        try:
            self._loop.call_soon_threadsafe(self._ran.set)
        except RuntimeError:  # the loop is closed
            self._closed.set()
        polls = round(BLOCKED_S / POLL_S)
        return any(self._ran.wait(POLL_S) or self._closed.is_set() for _ in range(polls))
