"""Inspect processes from outside, including those that are stopped or stuck in C code."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from plasmid.protocols import ProcessState
from plasmid.utils.safe_files import write_text
from plasmid.utils.waits.ledger import Wait
from plasmid.utils.waits.stacks import describe_process, locate_in_dump

from .stack_dumps import DUMP_S, describe_condition, describe_kernel_state, dump_stacks, inspect_children

SNAPSHOT_S = 3 * DUMP_S
"""Maximum time of `inspect_process`, in seconds."""
MAX_REPORTS = 20
"""Maximum number of reports of missed deadlines per process; most such deadlines only cost a sample."""
INTERVAL_S = 10.0
"""Minimum time between two reports, in seconds; all rollouts of a batch may miss their deadlines together."""


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """State of a process as seen from its machine."""

    condition: str
    position: str = ""
    text: str = ""
    servers: tuple[ProcessState, ...] = ()
    """Its child processes that can write their stacks on request, which are the processes of a server."""


def inspect_process(pid: int, log_file: Path, *, with_stacks: bool) -> ProcessSnapshot:
    """Return the state of a process on this machine. With ``with_stacks``, makes it write its stacks to its log.

    A stopped process is continued, because it could not write otherwise. Server processes always write their stacks.
    """
    try:
        process = psutil.Process(pid)
        condition = describe_condition(process)
        children = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return ProcessSnapshot("ended")
    servers, others = inspect_children(children)
    text = "".join(f"  {line}\n" for line in others)
    if not with_stacks or condition == "ended":
        return ProcessSnapshot(condition, text=f"child processes:\n{text}" if text else "", servers=servers)
    dump = dump_stacks({pid: log_file})[pid]
    found = dump or f"no stacks were written\n{describe_kernel_state(pid)}"
    return ProcessSnapshot(condition or "not responding", locate_in_dump(dump), f"{found}\n{text}\n", servers)


class LocalReports:
    """Writes reports of this process's missed deadlines to ``hangs/NAME-1.txt``, ``hangs/NAME-2.txt``, ..."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._folder, self._name = run_dir / "hangs", name
        self._count, self._next_at = 0, 0.0

    async def write(self, wait: Wait) -> None:
        """Write a report, up to the limits on number and interval. Raises `OSError`."""
        now = time.monotonic()
        if self._count >= MAX_REPORTS or now < self._next_at or not self._folder.parent.is_dir():
            return
        self._count, self._next_at = self._count + 1, now + INTERVAL_S
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{self._name}-{self._count}.txt"
        write_text(path, f"missed deadline: {wait}\n{describe_process()}")
