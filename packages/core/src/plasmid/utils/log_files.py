"""Log files of the processes of a run."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
from functools import cache
from pathlib import Path
from typing import TextIO, cast

from .printable import PrintableStream
from .safe_files import append_to

STACKS_SIGNAL = signal.SIGUSR2
"""Signal after which a process with a log writes the stacks of all threads to it, even if it is stuck in C code."""
STACKS_MEMORY = "plasmid-stacks-"
"""Prefix of the name of the in-memory file to which a process that shares a log writes its stacks; its id follows."""
READ_BYTES = 64 << 10
"""Number of bytes read from the end of a log."""
PROGRESS = re.compile(r"\d+%\||\d+(\.\d+)?(it|B|kB|MB|s)/(s|it)\b")
"""Matches progress bars."""
RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .*)?$")
"""Matches the last line of a traceback."""
WARNED = re.compile(r":\d+: \w*Warning: ")
"""Matches a Python warning; the following line is its source line."""
CRASHED = "Fatal Python error: "


def redirect_output(log: Path) -> None:
    """Redirect all output of this process and its libraries to one file, with crash reports and stacks."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = cast(TextIO, append_to(log, buffering=1))
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = cast(TextIO, PrintableStream(file))  # logs are read in terminals
    faulthandler.enable(file)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True)


@cache  # observers read the file of the first call
def write_stacks_to_memory() -> None:
    """Make this process and its forks write the stacks of all threads to a file in memory on `STACKS_SIGNAL`.

    For processes that share a log: others read the file through ``/proc/PID/fd``.
    """
    _register_memory()
    os.register_at_fork(after_in_child=_register_memory)


def _register_memory() -> None:
    memory = os.memfd_create(f"{STACKS_MEMORY}{os.getpid()}")  # stays open until the process ends
    faulthandler.register(STACKS_SIGNAL, memory, all_threads=True)


def read_exit_cause(log: Path, count: int = 5) -> str:
    """Return the reason why a process ended, from its log, on one line: a crash, an exception, or else the last lines.

    Skips progress bars and Python warnings. Empty if the log has nothing else.
    """
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
        text = file.read().decode(errors="replace")
    texts = [line.rpartition("\r")[2].strip() for line in text.split("\n")]
    quoted = {index for index, line in enumerate(texts) if index and WARNED.search(texts[index - 1])}
    noise = (PROGRESS, WARNED)
    lines = [
        line
        for index, line in enumerate(texts)
        if line and index not in quoted and not any(pattern.search(line) for pattern in noise)
    ]
    crashes = [index for index, line in enumerate(lines) if line.startswith(CRASHED)]
    if crashes:
        place = next((line for line in lines[crashes[-1] :] if line.startswith("File ")), "")
        return " | ".join(filter(None, (lines[crashes[-1]], place)))
    if lines and RAISED.match(lines[-1]):
        return lines[-1]
    return " | ".join(lines[-count:])
