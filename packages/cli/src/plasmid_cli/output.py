"""Where commands print to."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

WIDE = 200
"""Columns of tables that go into a file or a pipe, so that no line is cut."""


def table_console() -> Console:
    """Standard output; wide where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=WIDE)


def print_warning(message: str) -> None:
    """One line on standard error."""
    Console(stderr=True).print(Text.assemble(("warning:", "bold yellow"), f" {message}"), soft_wrap=True)


def print_error(message: str) -> None:
    """One line on standard error for each problem."""
    console = Console(stderr=True)
    for line in message.splitlines():
        # as Text: messages name tables such as [[rewards]], which must not be read as markup
        console.print(Text.assemble(("error:", "bold red"), f" {line}"), soft_wrap=True)
