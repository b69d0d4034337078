"""`rl doctor`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from .host import Finding

INDENT = 18
MARKS = {"ok": "ok", "warning": "?", "error": "!"}


def doctor() -> None:
    """Check this machine and the installed packages, and suggest fixes.

    Exits with 1 if a problem would make a run fail.
    """
    from ..output import output_console

    console, errors = output_console(), 0
    for finding in _findings():
        errors += finding.level == "error"
        lines = [f"{MARKS[finding.level]:<3}{finding.what:<15}{finding.text}"]
        lines += [f"{'':<{INDENT}}-> {finding.fix}"] if finding.fix else []
        for line in lines:
            console.print(_wrap(line, console.width) if console.is_terminal else line, soft_wrap=True)
    if errors:
        console.print(f"{errors} problem{'s' if errors > 1 else ''} would make a run fail")
        raise typer.Exit(1)


def _wrap(line: str, width: int) -> str:
    """Wrap a line between words, so that paths and commands can be copied."""
    indent, width = " " * INDENT, max(width, 2 * INDENT)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _findings() -> Iterator[Finding]:
    from .host import check_driver, check_host, driver_version
    from .packages import check_bytecode, check_libraries, check_plugins, check_versions, probe

    yield from check_host(os.environ)
    yield from check_versions()
    found = probe()
    yield from check_libraries(found)
    yield from check_bytecode()
    if "cuda" in found:  # otherwise torch cannot be loaded, and its CUDA version is unknown
        yield from check_driver(driver_version(), found["cuda"], int(found.get("gpus", 0)))
    yield from check_plugins()
