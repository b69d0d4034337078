"""Log files of the processes of a run."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import TextIO, cast

from .printable import PrintableStream
from .safe_files import append_to


def redirect_output(log: Path) -> None:
    """Send everything that this process and its libraries print into one file, and crash reports with it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = cast(TextIO, append_to(log, buffering=1))
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = cast(TextIO, PrintableStream(file))  # logs are read in terminals
    faulthandler.enable(file)


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log file on one line; empty if there is none."""
    if not log.is_file():
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-count:])
