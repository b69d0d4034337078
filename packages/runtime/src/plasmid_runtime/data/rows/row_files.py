"""Rows of JSONL, JSON, CSV and Parquet files, addressed by index."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from plasmid.errors import DataError

from .file_slices import FileSlice
from .json_lines import JsonLinesFile
from .listed_rows import read_csv, read_json
from .parquet_rows import ParquetFile


class RowFile(Protocol):
    """The rows of one file slice."""

    path: Path
    digest: str
    """Digest of the file's content and the slice; it changes if the rows change."""

    def __len__(self) -> int: ...

    def number(self, index: int) -> int:
        """Return a row's position in the whole file, from 1: its line in JSONL and CSV files, else its row number."""

    def index(self, number: int) -> int:
        """Return the index of the row at this position; the inverse of `number`."""

    def row(self, index: int) -> Mapping[str, Any]:
        """Read a row. Raises `DataError`."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


READERS: Mapping[str, Callable[[FileSlice], RowFile]] = {
    ".jsonl": JsonLinesFile,
    ".ndjson": JsonLinesFile,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": ParquetFile,
}
"""Readers by file extension."""


def open_rows(part: FileSlice) -> RowFile:
    """Open a file. Raises `DataError` if it is missing, empty, unreadable or of an unknown type."""
    path = part.path
    if path.suffix not in READERS:
        close = difflib.get_close_matches(path.suffix, READERS, n=1) if path.suffix else []
        hint = f"; did you mean {close[0]}?" if close else ""
        raise DataError(
            f"data.path: {path} is neither JSONL, JSON, CSV nor Parquet; its name must end in .jsonl, .json, .csv or "
            f".parquet{hint}"
        )
    if path.is_dir():
        raise DataError(f"data.path: {path} is a folder; set the files in it")
    if not path.exists():
        raise DataError(f"data.path: no such file: {path}{_hint(path)}")
    if not path.is_file():
        raise DataError(f"data.path: {path} is a pipe or a device; copy its rows into a file")
    try:
        return READERS[path.suffix](part)
    except OSError as error:
        raise DataError(f"data.path: cannot read {path}: {(error.strerror or str(error)).lower()}") from None


def _hint(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} (searched from {Path.cwd()})"
    close = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.iterdir()), n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else f" (searched from {Path.cwd()})"
