"""Journals of metrics: files with one JSON object per line, readable during the run, and repaired after ``kill -9``.

Nan and infinities, which JSON lacks, are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from plasmid.errors import CheckpointError
from plasmid.utils.safe_files import append_to, check_readable, replace_file

log = logging.getLogger(__name__)
MAX_STEP = 1 << 53
"""Upper bound on batch numbers; larger integers are not exact as floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of a journal."""

    step: int
    """Number of batches trained."""
    time: float
    """Seconds since 1970."""
    metrics: Mapping[str, float]
    name: str = ""
    """Name of the evaluation set; empty for training metrics."""


@dataclass(slots=True)
class Journal:
    """Appends to ``metrics.jsonl`` or ``evaluations.jsonl``. Raises `CheckpointError` if the file cannot be written."""

    path: Path
    _file: IO[str] | None = field(default=None, init=False, repr=False)

    def append(self, step: int, *, metrics: Mapping[str, float], name: str = "") -> None:
        """Write and flush one line, so that it survives a crash of the process."""
        line = _encode(Entry(step=step, time=time.time(), metrics=metrics, name=name))
        try:
            if self._file is None:
                self._file = append_to(self.path, encoding="utf-8")
                _drop_torn_line(self.path)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise _journal_error("write", self.path, error) from error

    def truncate_after(self, step: int) -> None:
        """Remove the entries after this step, which a resumed run writes again."""
        self.close()
        if not self.path.exists():
            return
        kept = [entry for entry in read_journal(self.path) if entry.step <= step]
        try:
            with replace_file(self.path, durable=True) as file:
                file.write("".join(map(_encode, kept)).encode("utf-8"))
        except OSError as error:
            raise _journal_error("write", self.path, error) from error

    def close(self) -> None:
        """Close the file; the next `append` reopens it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_journal(path: Path) -> list[Entry]:
    """Read all entries; none if there is no file. Ignores an incomplete last line, which a crash leaves.

    Raises `CheckpointError` for any other invalid line.
    """
    try:
        check_readable(path)
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _journal_error("read", path, error) from error
    *lines, torn = text.split("\n")
    if torn:
        log.warning("%s: removed an incomplete last line, left by a crash", path)
    return list(_entries(path, lines))


def count_valid_bytes(text: bytes, *, after: int | None = None) -> int:
    """Return the number of bytes of complete and valid lines at the start of ``text``.

    With ``after``, the steps of lines must increase from this step on.
    """
    end = 0
    for line in text.splitlines(keepends=True):
        try:
            (entry,) = _entries(Path(), [line.decode("utf-8")])
        except (CheckpointError, UnicodeDecodeError):
            return end
        if not line.endswith(b"\n") or (after is not None and entry.step <= after):
            return end
        end += len(line)
        after = None if after is None else entry.step
    return end


def _entries(path: Path, lines: Iterable[str]) -> Iterable[Entry]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if abs(record["step"]) > MAX_STEP:
                raise ValueError("not a batch number")
            yield Entry(
                step=int(record["step"]),
                time=float(record["time"]),
                metrics={str(name): float(value) for name, value in record["metrics"].items()},
                name=str(record.get("name", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise CheckpointError(f"{path}:{number}: not a line of metrics: {line[:60]!r}; remove the line") from None


def _encode(entry: Entry) -> str:
    record = {"step": entry.step, "time": entry.time} | ({"name": entry.name} if entry.name else {})
    return json.dumps(record | {"metrics": {n: _number(v) for n, v in entry.metrics.items()}}, allow_nan=False) + "\n"


def _number(value: float) -> float | str:
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        log.warning("%s: removed an incomplete last line, left by a crash", path)
        os.truncate(path, end)


def _journal_error(verb: str, path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot {verb} metrics: {(error.strerror or str(error)).lower()}")
