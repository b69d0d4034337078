"""File patterns with slices of rows, such as ``part-*.jsonl@[0:100]``."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from plasmid.errors import DataError

T = TypeVar("T")
log = logging.getLogger(__name__)
SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>(-?\d+)?):(?P<stop>(-?\d+)?)\]", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSlice:
    """One entry of ``data.path``."""

    path: Path
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> FileSlice:
        """Parse ``file.jsonl`` or ``file.jsonl@[start:stop]``. Raises `ValueError` for invalid slices."""
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

    def matches(self) -> list[FileSlice]:
        """Expand a pattern with ``*``, ``?`` or ``**`` into files sorted by name. Raises `DataError`.

        ``**`` does not follow symbolic links to folders, which may form cycles.
        """
        pattern = str(self.path)
        if not re.search(r"[*?]", pattern) or self.path.exists():
            return [self]
        found = sorted(_expand(pattern))
        if not found:
            raise DataError(f"data.path: no files match {pattern} (searched from {Path.cwd()})")
        return [replace(self, path=Path(name)) for name in found]

    def bounds(self, num_rows: int) -> range:
        """Return the selected rows of the file, counted from 0. Raises `DataError` if there are none."""
        rows = range(num_rows)[self.start : self.stop]
        if num_rows == 0:
            raise DataError(f"{self.path}: has no rows; every run needs at least one prompt")
        if not rows:
            raise DataError(f"{self}: the slice is empty; the file has {num_rows} rows")
        if any(bound is not None and abs(bound) > num_rows for bound in (self.start, self.stop)):
            log.warning("data: %s exceeds the %d rows of the file; it selects %d", self, num_rows, len(rows))
        return rows


def _expand(pattern: str) -> set[str]:
    """Return the names of all files that match a pattern. Like `glob.glob`, but iterative and safe from link cycles."""
    start, several, rest = pattern.partition("**")
    if not several or not (start == "" or start.endswith("/")) or not (rest == "" or rest.startswith("/")):
        return set(glob.glob(pattern))
    found = set()
    for folder in glob.glob(start) if start else ("",):
        for below in _folders(folder):
            found |= _expand(glob.escape(below) + (rest.lstrip("/") or "*"))
    return found


def _folders(folder: str) -> Iterator[str]:
    """Yield a folder and its subfolders that are neither hidden nor links, each with a trailing slash."""
    waiting = [folder]
    while waiting:
        yield (folder := waiting.pop())
        with suppress(OSError), os.scandir(folder or ".") as entries:
            waiting += [
                f"{folder}{entry.name}/"
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]


class NumberedRows:
    """Rows of a slice read into memory, with their numbers in the file and a digest of file and slice."""

    def __init__(self, part: FileSlice, content: bytes, numbers: Sequence[int]) -> None:
        """``numbers`` are the numbers of all rows of the file, ascending. Raises `DataError` if the slice is empty."""
        self._picked = part.bounds(len(numbers))
        self.path = part.path
        self._numbers = np.array(self._pick(numbers), np.int64)
        bounds = f"{self._picked.start}:{self._picked.stop}"
        self.digest = f"{hashlib.blake2b(content, digest_size=8).hexdigest()}:{bounds}"

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, index: int) -> int:
        return int(self._numbers[index])

    def index(self, number: int) -> int:
        return int(np.searchsorted(self._numbers, number))

    def _pick(self, rows: Sequence[T]) -> Sequence[T]:
        """Select the rows in the slice from all rows of the file."""
        return rows[self._picked.start : self._picked.stop]
