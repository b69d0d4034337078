"""Rows of JSON arrays and CSV files, which are read into memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plasmid.errors import DataError

from .file_slices import FileSlice, NumberedRows
from .json_lines import JsonLinesFile, check_row, parse_json

MAX_CELL = 4_000_000
"""Maximum length of a CSV cell, in characters."""


class ListedRows(NumberedRows):
    """Rows in memory, each with its number in the file."""

    def __init__(
        self, part: FileSlice, content: bytes, values: Sequence[Mapping[str, Any]], numbers: Sequence[int]
    ) -> None:
        super().__init__(part, content, numbers)
        self._rows = self._pick(values)

    def row(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)


def read_json(part: FileSlice) -> ListedRows | JsonLinesFile:
    """Read a ``.json`` file: an array of objects, numbered from 1, or one object per line. Raises `DataError`."""
    content = part.path.read_bytes()
    if not content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return JsonLinesFile(part)
    values = parse_json(_decode(part, content), part.path)
    for number, value in enumerate(values, start=1):
        check_row(value, part.path, number)
    return ListedRows(part, content, values, range(1, len(values) + 1))


def read_csv(part: FileSlice) -> ListedRows:
    """Read the rows below the header, numbered by their first line. Empty cells become null. Raises `DataError`."""
    content = part.path.read_bytes()
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader(io.StringIO(_decode(part, content), newline=""), strict=True)
    values: list[Mapping[str, Any]] = []
    numbers: list[int] = []
    names: list[str] = []
    line = 1
    try:
        for cells in reader:
            if not names:
                names = _header(part, cells)
            elif cells:
                values.append(_row(part, line, names, cells))
                numbers.append(line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{part.path}:{line}: not valid CSV: {error}") from None
    return ListedRows(part, content, values, numbers)


def _decode(part: FileSlice, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{part.path}: not valid UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None


def _header(part: FileSlice, cells: list[str]) -> list[str]:
    if not all(cells) or len(set(cells)) < len(cells):
        raise DataError(f"{part.path}:1: the header must name each column once, got {', '.join(cells) or 'nothing'}")
    return cells


def _row(part: FileSlice, line: int, names: list[str], cells: list[str]) -> Mapping[str, Any]:
    if len(cells) != len(names):
        raise DataError(
            f"{part.path}:{line}: the row has {len(cells)} cells, the header {len(names)}; quote cells that contain "
            "commas"
        )
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}
