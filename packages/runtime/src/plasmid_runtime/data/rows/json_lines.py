"""Rows of a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plasmid.errors import DataError

from .file_slices import FileSlice, NumberedRows


class JsonLinesFile(NumberedRows):
    """A file with one JSON object per line. Ignores blank lines, and parses lines on access."""

    def __init__(self, part: FileSlice) -> None:
        content = part.path.read_bytes()
        lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
        super().__init__(part, content, numbers)
        self._lines = [lines[number - 1] for number in self._numbers.tolist()]

    def row(self, index: int) -> Mapping[str, Any]:
        number = self.number(index)
        try:
            text = self._lines[index].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}:{number}: not valid UTF-8 at byte {error.start + 1} of the line; save the file as UTF-8"
            ) from None
        row = parse_json(text, self.path, number)
        check_row(row, self.path, number)
        return row  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self.row, range(len(self)))


def parse_json(text: str, path: Path, line: int | None = None) -> Any:
    """Parse the text of a file or of one of its lines. Raises `DataError`."""
    where = path if line is None else f"{path}:{line}"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        what = (error.msg[0].lower() + error.msg[1:]).removesuffix(" at")
        raise DataError(f"{path}:{line or error.lineno}: not valid JSON: {what} at column {error.colno}") from None
    except RecursionError:
        raise DataError(f"{where}: not valid JSON: nested too deeply") from None
    except ValueError as error:  # an integer with thousands of digits
        raise DataError(f"{where}: cannot be read: {str(error).lower()}") from None


def check_row(value: object, path: Path, number: int) -> None:
    """Raise `DataError` unless the value is an object."""
    if not isinstance(value, dict):
        raise DataError(f"{path}:{number}: a row must be an object with named values, got {type_name(value)}")


def type_name(value: object) -> str:
    """Return the JSON name of a value's type, with an article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return f"a number ({str(value)[:20]})"
    names: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
