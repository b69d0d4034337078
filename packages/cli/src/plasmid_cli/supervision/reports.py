"""Reports of a supervised run to its supervisor: JSON lines over an inherited socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any


class SupervisorLink:
    """The run's end of the socket. It is an observer of the run, and reports batches and checkpoints.

    If the supervisor ends, the run saves and ends as well, since it would no longer be restarted or receive signals.
    """

    def __init__(self, descriptor: int, restarts: int) -> None:
        """``restarts`` is the number of restarts so far, which is written into ``run.json``."""
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._restarts = restarts
        threading.Thread(target=self._end_with_supervisor, name="supervisor", daemon=True).start()

    def run_started(self, run_dir: Path) -> None:
        """Report the folder, and write the number of restarts."""
        from plasmid.utils.json_text import read_json
        from plasmid.utils.safe_files import write_text

        self._send(run_dir=str(run_dir))
        if self._restarts:
            info = run_dir / "run.json"
            write_text(info, json.dumps({**read_json(info), "restarts": self._restarts}, indent=1), durable=True)

    def phase_started(self, batch: int, phase: str) -> None:
        """Report the current phase of a batch."""
        self._send(batch=batch, phase=phase)

    def checkpoint_saved(self, batch: int) -> None:
        """Report a checkpoint, from which a restart continues."""
        self._send(saved=batch)

    def report_error(self, text: str) -> None:
        """Report why the run ends."""
        self._send(error=text)

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the supervisor has ended
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _end_with_supervisor(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.recv(1)  # returns when the supervisor ends, which sends nothing
        os.kill(os.getpid(), signal.SIGTERM)


_link: SupervisorLink | None = None


def connect(descriptor: int, restarts: int) -> SupervisorLink:
    """Connect this process to its supervisor."""
    global _link
    _link = SupervisorLink(descriptor, restarts)
    return _link


def report_error(text: str) -> None:
    """Report to the supervisor, if there is one, why this process ends."""
    if _link is not None:
        _link.report_error(text)
