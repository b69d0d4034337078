"""Rows of JSONL and Parquet files, with slices: ``file.jsonl@[0:100]``."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import DataError

log = logging.getLogger(__name__)
JSON_LINES = (".jsonl", ".ndjson")
SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>(-?\d+)?):(?P<stop>(-?\d+)?)\]", re.ASCII)
CHUNK = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSlice:
    """One entry of ``data.path``."""

    path: Path
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> FileSlice:
        """``file.jsonl`` or ``file.jsonl@[start:stop]`` as Python slices. Raises `ValueError` for other brackets."""
        match = SLICE.fullmatch(text)
        if match is None:
            if re.search(r"@\[?[^/]*\]$", text) or not text:
                raise ValueError(f"{text!r} must be a file, or look like file.jsonl@[0:100] (start, stop; no step)")
            return cls(path=Path(text))
        start, stop = (int(bound) if bound else None for bound in match.group("start", "stop"))
        return cls(path=Path(match["path"]), start=start, stop=stop)

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return str(self.path)
        start, stop = ("" if bound is None else str(bound) for bound in (self.start, self.stop))
        return f"{self.path}@[{start}:{stop}]"

    def bounds(self, num_rows: int) -> range:
        """Which rows of the file are meant, counted from 0. Raises `DataError` if there is none."""
        rows = range(num_rows)[self.start : self.stop]
        if num_rows == 0:
            raise DataError(f"{self.path}: has no rows; every run needs at least one prompt")
        if not rows:
            raise DataError(f"{self}: the slice holds no row; the file has {num_rows}")
        if any(bound is not None and abs(bound) > num_rows for bound in (self.start, self.stop)):
            log.warning("data: %s reaches past the %d rows of the file; it holds %d", self, num_rows, len(rows))
        return rows


class RowFile(Protocol):
    """The rows of one file slice."""

    digest: str
    """Of the file's bytes and the slice: another digest means other rows."""

    def __len__(self) -> int: ...

    def number(self, index: int) -> int:
        """Where a row stands in the whole file, from 1: the line of a JSONL file, the row of a Parquet file."""
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
    try:
        return ParquetFile(part) if path.suffix == ".parquet" else JsonLinesFile(part)
    except OSError as error:
        raise DataError(f"data.path: cannot read {path}: {(error.strerror or str(error)).lower()}") from None


def _hint(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}, seen from {Path.cwd()}"
    close = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.iterdir()), n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else f", seen from {Path.cwd()}"


def _digest(content: bytes | memoryview, rows: range) -> str:
    return f"{hashlib.blake2b(content, digest_size=8).hexdigest()}:{rows.start}:{rows.stop}"


class JsonLinesFile:
    """One JSON object a line; blank lines do not count. Lines stay bytes until they are asked for."""

    def __init__(self, part: FileSlice) -> None:
        content = part.path.read_bytes()
        lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
        rows = part.bounds(len(numbers))
        self._path = part.path
        self._numbers = np.array(numbers[rows.start : rows.stop], np.int64)
        self._lines = [lines[number - 1] for number in numbers[rows.start : rows.stop]]
        self.digest = _digest(content, rows)

    def __len__(self) -> int:
        return len(self._lines)

    def number(self, index: int) -> int:
        return int(self._numbers[index])

    def row(self, index: int) -> Mapping[str, Any]:
        where = f"{self._path}:{self.number(index)}"
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


class ParquetFile:
    """Rows of a Parquet file. They stay in columns until they are asked for."""

    def __init__(self, part: FileSlice) -> None:
        import pyarrow
        from pyarrow import parquet

        try:
            table = parquet.read_table(part.path, memory_map=True)
        except pyarrow.ArrowException as error:
            what = str(error).splitlines()[0].lower()
            raise DataError(f"{part.path}: not a Parquet file that can be read: {what}") from None
        if len(set(table.column_names)) < len(table.column_names):
            raise DataError(f"{part.path}: two columns have one name: {', '.join(sorted(table.column_names))}")
        rows = part.bounds(table.num_rows)
        self._path = part.path
        self._first = rows.start + 1
        self._table = table.slice(rows.start, len(rows))
        with part.path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        self.digest = _digest(content, rows)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def number(self, index: int) -> int:
        return self._first + index

    def row(self, index: int) -> Mapping[str, Any]:
        return self._read(index, 1)[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for start in range(0, len(self), CHUNK):
            yield from self._read(start, CHUNK)

    def _read(self, start: int, count: int) -> list[Mapping[str, Any]]:
        try:
            rows: list[Mapping[str, Any]] = self._table.slice(start, count).to_pylist()
        except UnicodeDecodeError:
            if count > 1:  # find the row that is wrong
                return [self.row(index) for index in range(start, min(start + count, len(self)))]
            raise DataError(f"{self._path}:{self.number(start)}: not valid UTF-8; write the file anew") from None
        return rows


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
