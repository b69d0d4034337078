"""Watch the daemons of a private Ray cluster, and describe their failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
from plasmid.utils.log_files import read_exit_cause

from .ray_watch import is_of_session

CONTROL = "gcs_server"
NAMES = {CONTROL: "Ray's control process (gcs_server)", "raylet": "Ray's scheduler (raylet)"}
POLL_S = 0.5
HINT = "it crashed or was killed, perhaps because memory ran out (see `dmesg`); continue with --resume"


class RayDaemons:
    """Ray daemons that this process started. Ray needs a minute to notice that one died, and then kills the driver."""

    def __init__(self, folder: Path) -> None:
        """``folder`` contains the folders of Ray's sessions."""
        driver = psutil.Process()
        children = [one for one in driver.children() if one.name() in NAMES and is_of_session(one, driver.pid)]
        self._running = {one: one.name() for one in children}
        # sorted by time; the link `session_latest` may point to the session of another run
        sessions = sorted(folder.glob(f"session_*_{driver.pid}"))
        self._logs = sessions[-1] / "logs" if sessions else folder

    def control_loss(self) -> str:
        """Describe the end of the control process; empty while it runs."""
        return self._loss(CONTROL)

    async def failure(self) -> str:
        """Wait until a daemon has ended, and describe it."""
        while not (loss := self._loss(*NAMES)):
            await asyncio.sleep(POLL_S)
        return loss

    def _loss(self, *names: str) -> str:
        ended = (one for one, name in self._running.items() if name in names and not _is_alive(one))
        return next((self._describe(self._running[one], one.pid) for one in ended), "")

    def _describe(self, name: str, pid: int) -> str:
        words = read_exit_cause(self._logs / f"{name}.err") or read_exit_cause(self._logs / f"{name}.out", 1)
        quote = f"; its log ends with: {words}" if words else ""
        return f"{NAMES[name]}, process {pid}, has ended, which ends the run{quote}; {HINT}"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
