"""Clean up after a private Ray cluster: kill remaining processes, and remove the session's folder.

`RayWatch` starts this file as a separate process. When the driver ends, even by SIGKILL, or calls `RayWatch.close`, it
kills the remaining descendants of the driver and removes the session's folder. Ray's daemons end with the driver, but
the agents that they started do not.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

FAST_S, SLOW_S = 0.5, 5.0
"""Interval at which descendants are listed, in seconds: while Ray starts, and later."""
STARTING_S = 60.0
CLOSE_S = 20.0
"""Maximum time that `RayWatch.close` waits, in seconds."""
END_S = 5.0
"""Maximum time between the closing of the pipe and the end of a killed driver, in seconds."""
DETACHED_S = 10.0
"""After a driver was killed, time that processes with their own session have to finish, in seconds, such as a tracker
that uploads metrics."""
CLOSE, KEEP = b"c", b"k"
"""Messages of `RayWatch.close`; a driver that is killed sends nothing."""


class RayWatch:
    """Handle of the watch process. Create it before starting Ray."""

    def __init__(self, folder: Path) -> None:
        """``folder`` contains the folders of Ray's sessions, ``session_<time>_<driver's process id>``."""
        self.folder = folder
        # earlier sessions of drivers with the same process id, such as those in other containers, are not removed
        before = [path.name for path in folder.glob(f"session_*_{os.getpid()}")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), str(folder), *before],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C does not interrupt the watch process
        )

    def close(self, *, keep_folder: bool = False) -> None:
        """Clean up, and wait until the watch process has ended. ``keep_folder`` keeps Ray's logs for the user."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(KEEP if keep_folder else CLOSE)
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)


def watch(driver: psutil.Process, folder: Path, before: set[str]) -> None:
    """Wait until the driver ends or closes standard input, and clean up, except sessions named in ``before``."""
    started, seen, own, said = time.time(), set[psutil.Process](), set[psutil.Process](), b""
    detached = set[psutil.Process]()
    session_id = os.getsid(driver.pid)  # asked now: it is unknown once the driver has ended
    while os.getppid() == driver.pid:
        with contextlib.suppress(psutil.Error):
            seen = {one for one in seen if one.is_running()} | set(driver.children(recursive=True))
        seen.discard(psutil.Process())  # its own command line also contains names of sessions
        daemons = [one for one in seen if is_of_session(one, driver.pid)]
        own |= find_descendants(seen, daemons)
        detached = {one for one in seen - own if _is_detached(one, session_id)}
        ready, _, _ = select.select([0], [], [], FAST_S if time.time() - started < STARTING_S else SLOW_S)
        if ready:
            said = os.read(0, 1) or wait_for_end(driver.pid)
            break
    # a driver that is alive keeps its other processes, including other runs' clusters
    _kill({one for one in own if one.is_running()} if said else seen - detached)
    for session in () if said == KEEP else folder.glob(f"session_*_{driver.pid}"):
        if session.name not in before:
            shutil.rmtree(session, ignore_errors=True)
    latest = folder / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)
    if not said:
        _, running = psutil.wait_procs(detached, timeout=DETACHED_S)
        _kill(set(running))


def wait_for_end(driver: int) -> bytes:
    """Return an empty message if the driver ends soon after closing standard input without a message, else `CLOSE`."""
    until = time.time() + END_S
    while os.getppid() == driver and time.time() < until:
        time.sleep(0.1)
    return CLOSE if os.getppid() == driver else b""


def is_of_session(process: psutil.Process, driver: int) -> bool:
    """Return True if a process is a daemon of the driver's Ray: its command line contains the name of the session."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return re.search(rf"session_[^/\s]*_{driver}(?![^/\s])", command) is not None


def find_descendants(processes: set[psutil.Process], roots: list[psutil.Process]) -> set[psutil.Process]:
    """Return the roots and those of the processes that descend from them.

    `psutil.Process.children` would read the parents of all processes of the machine for each root.
    """
    parents, found = dict[int, int](), {one.pid for one in roots}
    for one in processes:
        with contextlib.suppress(psutil.Error):
            parents[one.pid] = one.ppid()
    while added := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= added
    return {one for one in processes if one.pid in found}


def _is_detached(process: psutil.Process, session_id: int) -> bool:
    """Return True if a process, or what started it, has left the driver's session (`setsid`)."""
    try:
        return os.getsid(process.pid) != session_id
    except OSError:
        return False


def _kill(processes: set[psutil.Process]) -> None:
    for one in [*processes, *(child for process in processes for child in _children(process))]:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(list(processes), timeout=5)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
        return found
    except psutil.Error:
        return []


if __name__ == "__main__":
    with contextlib.suppress(psutil.NoSuchProcess):
        watch(psutil.Process(int(sys.argv[1])), Path(sys.argv[2]), set(sys.argv[3:]))
