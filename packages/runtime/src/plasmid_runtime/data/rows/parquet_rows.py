"""Rows of a Parquet file."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from plasmid.errors import DataError

from .file_slices import FileSlice

CHUNK = 1000
"""Number of rows converted to Python objects at a time."""
GROUPS = 4
"""Number of cached row groups. Shuffled rows come from all groups, so files with many small ones need little memory."""


class ParquetFile:
    """A Parquet file. Reads row groups on access and converts only requested rows."""

    def __init__(self, part: FileSlice) -> None:
        import pyarrow
        from pyarrow import parquet

        try:
            self._file = parquet.ParquetFile(part.path, memory_map=True)
            names = self._file.schema_arrow.names
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            what = str(error).splitlines()[0].lower()
            raise DataError(f"{part.path}: not a readable Parquet file: {what}") from None
        if len(set(names)) < len(names):
            raise DataError(f"{part.path}: two columns have the same name: {', '.join(sorted(names))}")
        meta = self._file.metadata
        self._ends = np.cumsum([meta.row_group(i).num_rows for i in range(meta.num_row_groups)])
        in_groups = int(self._ends[-1]) if len(self._ends) else 0
        if in_groups != meta.num_rows:
            raise DataError(
                f"{part.path}: damaged: its metadata has {meta.num_rows} rows, but its row groups have {in_groups}; "
                "write the file again"
            )
        self._rows = part.bounds(meta.num_rows)
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self.path = part.path
        with part.path.open("rb") as file:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
        self.digest = f"{content}:{self._rows.start}:{self._rows.stop}"

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, index: int) -> int:
        return self._rows[index] + 1

    def index(self, number: int) -> int:
        return number - 1 - self._rows.start

    def row(self, index: int) -> Mapping[str, Any]:
        return self._read(index, 1)[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        start = 0
        while start < len(self):
            rows = self._read(start, CHUNK)
            yield from rows
            start += len(rows)

    def _read(self, start: int, count: int) -> list[Mapping[str, Any]]:
        """Read at most ``count`` rows from ``start`` on, within one row group."""
        at = self._rows[start]
        number = int(np.searchsorted(self._ends, at, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        count = min(count, int(self._ends[number]) - at, len(self) - start)
        try:
            rows: list[Mapping[str, Any]] = self._group(number).slice(at - first, count).to_pylist()
        except UnicodeDecodeError:
            if count > 1:  # find the invalid row
                return [self.row(index) for index in range(start, start + count)]
            raise DataError(f"{self.path}:{self.number(start)}: not valid UTF-8; write the file again") from None
        return rows

    def _group(self, number: int) -> Any:
        import pyarrow

        if number not in self._groups:
            try:
                self._groups[number] = self._file.read_row_group(number)
            except (pyarrow.ArrowException, OSError) as error:
                what = str(error).splitlines()[0].lower()
                raise DataError(f"{self.path}: row group {number} cannot be read: {what}") from None
            read, expected = self._groups[number].num_rows, self._file.metadata.row_group(number).num_rows
            if read != expected:
                raise DataError(
                    f"{self.path}: damaged: row group {number} has {read} rows instead of {expected}; write the file "
                    "again"
                )
            if len(self._groups) > GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(number)
        return self._groups[number]
