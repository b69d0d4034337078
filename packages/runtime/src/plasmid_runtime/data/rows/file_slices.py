"""Which rows of which files are meant: ``part-*.jsonl@[0:100]``."""

from __future__ import annotations

import glob
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

from plasmid.errors import DataError

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

    def matches(self) -> list[FileSlice]:
        """The files that a pattern with ``*``, ``?`` or ``**`` stands for, sorted by name. Raises `DataError`."""
        pattern = str(self.path)
        if not re.search(r"[*?]", pattern) or self.path.exists():
            return [self]
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f"data.path: no file is named like {pattern}, seen from {Path.cwd()}")
        return [replace(self, path=Path(name)) for name in found]

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
