"""Rows of JSONL and Parquet files, addressed by index."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from plasmid.errors import DataError

from .file_slices import FileSlice
from .json_lines import JsonLinesFile
from .parquet_rows import ParquetFile

JSON_LINES = (".jsonl", ".ndjson")


class RowFile(Protocol):
    """The rows of one file slice."""

    path: Path
    digest: str
    """Of the file's bytes and the slice: another digest means other rows."""

    def __len__(self) -> int: ...

    def number(self, index: int) -> int:
        """Where a row stands in the whole file, from 1: the line of a JSONL file, the row of a Parquet file."""
        ...

    def index(self, number: int) -> int:
        """The row that stands there; undoes `number`."""
        ...

    def row(self, index: int) -> Mapping[str, Any]:
        """One row. Raises `DataError`."""
        ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


def open_rows(part: FileSlice) -> RowFile:
    """Read a file. Raises `DataError` if it is missing, empty, of an unknown kind or cannot be read."""
    path = part.path
    if path.suffix not in (*JSON_LINES, ".parquet"):
        raise DataError(f"data.path: {path} is neither JSONL nor Parquet; its name must end in .jsonl or .parquet")
    if path.is_dir():
        raise DataError(f"data.path: {path} is a folder; name the files in it")
    if not path.exists():
        raise DataError(f"data.path: no such file: {path}{_hint(path)}")
    if not path.is_file():
        raise DataError(f"data.path: {path} is no regular file, but a pipe or a device; copy its rows into a file")
    try:
        return ParquetFile(part) if path.suffix == ".parquet" else JsonLinesFile(part)
    except OSError as error:
        raise DataError(f"data.path: cannot read {path}: {(error.strerror or str(error)).lower()}") from None


def _hint(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}, seen from {Path.cwd()}"
    close = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.iterdir()), n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else f", seen from {Path.cwd()}"
