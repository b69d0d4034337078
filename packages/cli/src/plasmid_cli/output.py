"""Where commands print to. No control character of a file, a model or a recipe reaches the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO, cast

from plasmid.utils.printable import PrintableStream, printable
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

WIDE = 200
"""Columns of tables that go into a file or a pipe, so that no line is cut."""
MAX_ERROR = 2000
"""Characters of one error. Of a longer one the middle is left out: the end says what to do."""


class SafeConsole(Console):
    """A console whose texts are printable: escape sequences and links come from our own styles alone, never from text.

    Strings are no markup, so that ``[link=...]`` in a name is nothing but text.
    """

    def __init__(self, stream: TextIO, *, width: int | None = None) -> None:
        raw = stream.stream if isinstance(stream, PrintableStream) else stream
        super().__init__(file=raw, width=width, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of whatever is printed; texts within tables and panels come through here as well."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control:
                yield segment
            else:
                yield Segment(printable(text), style.update_link(None) if style and style.link else style)


def output_console() -> SafeConsole:
    """Standard output."""
    return SafeConsole(sys.stdout)


def table_console() -> SafeConsole:
    """Standard output; wide where it is no terminal."""
    return output_console() if sys.stdout.isatty() else SafeConsole(sys.stdout, width=WIDE)


def error_console() -> SafeConsole:
    """Standard error."""
    return SafeConsole(sys.stderr)


def print_line(text: str) -> None:
    """One line on standard output, not wrapped."""
    output_console().print(text, soft_wrap=True)


def print_warning(message: str) -> None:
    """One line on standard error."""
    error_console().print(Text.assemble(("warning:", "bold yellow"), f" {printable(message)}"), soft_wrap=True)


def print_error(message: str) -> None:
    """One line on standard error for each problem."""
    console = error_console()
    for line in message.split("\n"):
        console.print(Text.assemble(("error:", "bold red"), f" {_shorten(printable(line))}"), soft_wrap=True)


def _shorten(line: str) -> str:
    return line if len(line) <= MAX_ERROR else f"{line[: MAX_ERROR // 2]} ... {line[-MAX_ERROR // 2 :]}"


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Let libraries (warnings, logs, bars), too, write nothing but printable text to the standard streams."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(cast(TextIO, PrintableStream(sys.stdout))))
        stack.enter_context(contextlib.redirect_stderr(cast(TextIO, PrintableStream(sys.stderr))))
        yield
