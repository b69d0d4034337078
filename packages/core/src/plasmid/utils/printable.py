"""Escape control characters in text for terminals."""

from __future__ import annotations

import unicodedata
from typing import Any, TextIO

INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode categories that are escaped: control and format characters (bidirectional overrides, zero width), surrogates,
line and paragraph separators."""


def escape_unprintable(text: str) -> str:
    r"""Escape terminal control and invisible characters, as ``\x1b`` or ``\u202e``. Keeps line feeds and tabs."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in INVISIBLE:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class PrintableStream:
    """A text stream that escapes unprintable text. All other methods are those of the wrapped ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text, escaped. Returns the number of characters given."""
        self.stream.write(escape_unprintable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of the lines, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
