"""Run `rl train` as a child process, and restart it from its newest checkpoint when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plasmid.errors import EXIT_MISTAKE
from plasmid_sandbox.confinement.linux import PR_SET_CHILD_SUBREAPER, end_children, prctl

from ..interrupts import INTERRUPTED
from ..output import print_error, print_warning, transcript

FIRST_DELAY_S, MAX_DELAY_S = 2.0, 300.0
"""Delay before the first restart, and its maximum, in seconds. It doubles until there is a new checkpoint, with a
jitter of 50 %."""
CLEANUP_S = 30.0
"""Maximum time for remaining processes of a dead run (`RayWatch`, resource trackers) to end, in seconds."""
KILL_S = 10.0
"""Maximum time for killed processes to end, in seconds."""
MAX_CAUSE_LENGTH = 300
FINAL = (0, EXIT_MISTAKE, INTERRUPTED)
"""Exit codes after which the run is not restarted."""
STOP_SIGNALS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
"""Signals that end the supervisor, each with the signal that it sends to the run, which then saves and ends."""


@dataclass(slots=True)
class Attempt:
    """Reports of one process of the run."""

    run_dir: str = ""
    batch: int = 0
    """Number of finished batches."""
    phase: str = "start"
    saved: int | None = None
    """Batch of the newest checkpoint that it wrote."""
    error: str = ""

    def read(self, own_end: socket.socket) -> None:
        """Read reports until the run ends."""
        with contextlib.suppress(OSError), own_end.makefile("rb") as lines:
            for line in lines:
                for name, value in json.loads(line).items():
                    setattr(self, name, value)

    def cause(self, code: int) -> str:
        """Return why the process ended, on one line."""
        text = " ".join(self.error.split()) or f"exit code {code}"
        if code < 0:
            text = f"killed by {signal.Signals(-code).name}"
        return text if len(text) <= MAX_CAUSE_LENGTH else f"{text[:MAX_CAUSE_LENGTH]} ..."

    def place(self) -> str:
        """Return in which batch the process ended."""
        return "while starting" if self.phase == "start" else f"in batch {self.batch + 1}"


class Supervisor:
    """Supervises one run, whose process is restarted when it dies."""

    def __init__(self, make_command: Callable[[str], Sequence[str]], *, max_restarts: int) -> None:
        """``make_command`` returns the command that resumes the run in a folder, or starts it if the name is empty."""
        self._make_command, self._max_restarts = make_command, max_restarts
        self._run_dir, self._restarts = "", 0
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopped = self._is_waiting = False

    def run(self) -> int:
        """Run until the end, a stop, or an error that a restart cannot fix. Returns the exit code."""
        if sys.platform == "linux":
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # makes orphans of a dead run children of this process
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # keep signals ignored, as under nohup
                signal.signal(number, self._on_signal)
        failures, has_started, before = 0, False, None
        while True:
            attempt, code = self._attempt()
            if code in FINAL or self._is_stopped:
                return _shell_code(code)
            if attempt.saved is not None:
                failures, before = 0, None
            failures, has_started = failures + 1, has_started or attempt.phase != "start"
            # a start that fails after others succeeded may only need time, for a missing machine or memory to be freed
            place = (attempt.batch, code) if attempt.phase != "start" or not has_started else None
            where, cause = attempt.place(), attempt.cause(code)
            if place is not None and place == before:
                print_error(f"the run died twice {where} with no new checkpoint, so it is not restarted: {cause}")
                return _shell_code(code)
            if failures > self._max_restarts:
                print_error(f"no new checkpoint after {self._max_restarts} restarts, the limit: {cause}")
                return _shell_code(code)
            before = place or before
            self._wait_to_restart(f"the run died {where}: {cause}", failures)

    def _wait_to_restart(self, what: str, failures: int) -> None:
        delay = min(FIRST_DELAY_S * 2 ** (failures - 1), MAX_DELAY_S) * random.uniform(0.5, 1.5)
        print_warning(f"{what}; restart {failures} of {self._max_restarts} in {delay:.1f} s")
        self._restarts += 1
        self._is_waiting = True
        time.sleep(delay)
        self._is_waiting = False

    def _attempt(self) -> tuple[Attempt, int]:
        """Start the run, wait for its end, and clean up its processes."""
        attempt = Attempt()
        own_end, run_end = socket.socketpair()
        with own_end:
            with run_end:
                options = [f"--supervisor={run_end.fileno()}", f"--restarts={self._restarts}"]
                self._child = subprocess.Popen(
                    [*self._make_command(self._run_dir), *options],
                    pass_fds=[run_end.fileno()],
                    process_group=0,  # Ctrl-C reaches it only through this process
                )
            if self._is_stopped:
                self._child.send_signal(signal.SIGTERM)
            reader = threading.Thread(target=attempt.read, args=(own_end,), daemon=True)
            reader.start()
            code = _wait_for(self._child)
            self._child = None
            _clean_up()
            reader.join(KILL_S)
        if attempt.run_dir and attempt.run_dir != self._run_dir:
            self._run_dir = attempt.run_dir
            transcript().run_started(Path(attempt.run_dir))
        return attempt, code

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_stopped = True
        if self._child is not None:
            self._child.send_signal(STOP_SIGNALS[signal.Signals(number)])
        elif self._is_waiting:
            raise KeyboardInterrupt


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the child, negative for a signal. Also reaps orphans of the run."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


def _clean_up() -> None:
    """Wait for the remaining processes of the run, then kill them."""
    until = time.monotonic() + CLEANUP_S
    while time.monotonic() < until:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.05)
    if not end_children(KILL_S):
        print_warning("some processes of the run cannot be killed")


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
