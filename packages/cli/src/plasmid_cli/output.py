"""Output of commands. Control characters from files, models or recipes never reach the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from plasmid.utils.addresses import hide_user_info
from plasmid.utils.printable import PrintableStream, escape_unprintable
from plasmid_runtime.observe.driver_log import Transcript
from rich.console import Console, ConsoleOptions, RenderableType
from rich.control import Control
from rich.segment import Segment
from rich.text import Text

WIDE = 200
"""Width of tables written to a file or a pipe, in columns, so that no line is truncated."""
MAX_ERROR = 2000
"""Maximum length of an error, in characters. The middle of a longer one is cut, as its end suggests the fix."""


_transcript: Transcript | None = None


def begin_transcript() -> None:
    """Start a transcript of everything that is printed."""
    global _transcript
    _transcript = Transcript()


def end_transcript() -> None:
    """Close the transcript, if there is one."""
    global _transcript
    if _transcript is not None:
        _transcript.close()
    _transcript = None


def transcript() -> Transcript:
    """Return the transcript of this command. Pass it to a run as an observer."""
    return _transcript or Transcript()


def transcript_console() -> Console:
    """Return a console that only prints into the transcript."""
    return Console(file=cast(TextIO, transcript()), width=WIDE, markup=False, emoji=False, highlight=False)


class _CopyingStream(PrintableStream):
    """Prints output of libraries and copies it to the transcript."""

    def write(self, text: str) -> int:
        if _transcript is not None:
            _transcript.write(text)
        return super().write(text)


class SafeConsole(Console):
    """A console that escapes unprintable text: only Plasmid's own styles produce escape sequences and links.

    Strings are not parsed as markup, so ``[link=...]`` in a name is plain text.
    """

    def __init__(self, stream: TextIO, *, width: int | None = None) -> None:
        raw = stream.stream if isinstance(stream, PrintableStream) else stream
        super().__init__(file=raw, width=width, markup=False, emoji=False, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, and copy the output to the transcript, except for live displays."""
        super().print(*objects, **options)
        if _transcript is not None and not all(isinstance(one, Control) for one in objects):
            transcript_console().print(*objects, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render to segments; text inside tables and panels also passes through here."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control:
                yield segment
            else:
                yield Segment(escape_unprintable(text), style.update_link(None) if style and style.link else style)


def output_console() -> SafeConsole:
    """Return a console on standard output."""
    return SafeConsole(sys.stdout)


def table_console() -> SafeConsole:
    """Return a console on standard output, with a fixed width unless it is a terminal."""
    return output_console() if sys.stdout.isatty() else SafeConsole(sys.stdout, width=WIDE)


def error_console() -> SafeConsole:
    """Return a console on standard error."""
    return SafeConsole(sys.stderr)


def print_line(text: str) -> None:
    """Print one line to standard output, without wrapping."""
    output_console().print(text, soft_wrap=True)


def print_warning(message: str) -> None:
    """Print a warning on one line to standard error."""
    error_console().print(Text.assemble(("warning:", "bold yellow"), f" {_clean_message(message)}"), soft_wrap=True)


def print_error(message: str) -> None:
    """Print an error to standard error, one line per problem."""
    console = error_console()
    for line in message.split("\n"):
        console.print(Text.assemble(("error:", "bold red"), f" {_shorten(_clean_message(line))}"), soft_wrap=True)


def _clean_message(message: str) -> str:
    return hide_user_info(escape_unprintable(message))


def _shorten(line: str) -> str:
    return line if len(line) <= MAX_ERROR else f"{line[: MAX_ERROR // 2]} ... {line[-MAX_ERROR // 2 :]}"


@contextlib.contextmanager
def escape_output() -> Iterator[None]:
    """Escape unprintable text that libraries (warnings, logs, bars) write to the standard streams."""
    out, errors = (cast(TextIO, _CopyingStream(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        yield
