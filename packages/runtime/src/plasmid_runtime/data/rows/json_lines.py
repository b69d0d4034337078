"""Rows of a JSONL file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from plasmid.errors import DataError

from .file_slices import FileSlice


class JsonLinesFile:
    """One JSON object a line; blank lines do not count. Lines stay bytes until they are asked for."""

    def __init__(self, part: FileSlice) -> None:
        content = part.path.read_bytes()
        lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
        rows = part.bounds(len(numbers))
        self.path = part.path
        self._numbers = np.array(numbers[rows.start : rows.stop], np.int64)
        self._lines = [lines[number - 1] for number in numbers[rows.start : rows.stop]]
        self.digest = f"{hashlib.blake2b(content, digest_size=8).hexdigest()}:{rows.start}:{rows.stop}"

    def __len__(self) -> int:
        return len(self._lines)

    def number(self, index: int) -> int:
        return int(self._numbers[index])

    def index(self, number: int) -> int:
        return int(np.searchsorted(self._numbers, number))

    def row(self, index: int) -> Mapping[str, Any]:
        where = f"{self.path}:{self.number(index)}"
        try:
            row = json.loads(self._lines[index].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: not valid UTF-8 at byte {error.start + 1} of the line; save the file as UTF-8"
            ) from None
        except json.JSONDecodeError as error:
            what = error.msg[0].lower() + error.msg[1:]
            raise DataError(f"{where}: not valid JSON: {what} at column {error.colno}") from None
        except RecursionError:
            raise DataError(f"{where}: not valid JSON: nested too deeply") from None
        except ValueError as error:  # a number of thousands of digits
            raise DataError(f"{where}: cannot be read: {str(error).lower()}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: a row must be an object with named values, got {type_name(row)}")
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self.row, range(len(self)))


def type_name(value: object) -> str:
    """What JSON calls the type of a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return f"a number ({str(value)[:20]})"
    names: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
