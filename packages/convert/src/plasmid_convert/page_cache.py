"""Reads weight files into the page cache while a conversion still imports its libraries."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

PIECE_BYTES = 8 << 20
SHARE = 0.25
"""Maximum share of the available memory to fill. The system may drop these pages at any time."""
OPTIMIZER = b"optimizer"
"""Part of the names in checkpoints that also contain an optimizer's state, which conversions do not read."""


def start_read_ahead(*paths: Path) -> threading.Thread:
    """Start to read the weight files of checkpoints in a thread, and return it. Ignores files that cannot be read."""
    thread = threading.Thread(target=_read_ahead, args=(paths,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def weight_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint that a conversion reads as a whole, in the order in which it reads them."""
    if path.is_file():
        return [path]
    distributed = sorted(path.glob("*.distcp"))
    if distributed:
        try:
            return [] if OPTIMIZER in (path / ".metadata").read_bytes() else distributed
        except OSError:
            return []
    return sorted(path.glob("*.safetensors"))


def _read_ahead(paths: Sequence[Path]) -> None:
    rest = int(SHARE * available_bytes())
    for file in (file for path in paths for file in weight_files(path)):
        try:
            rest -= sum(_read(file, rest))
        except OSError:
            continue


def _read(file: Path, limit: int) -> Iterator[int]:
    """Ask the kernel to read up to ``limit`` bytes of a file ahead. Yields the size of each piece."""
    with file.open("rb", buffering=0) as opened:
        size = min(os.fstat(opened.fileno()).st_size, limit)
        for start in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - start)
            os.posix_fadvise(opened.fileno(), start, length, os.POSIX_FADV_WILLNEED)
            yield length


def available_bytes() -> int:
    """Return the memory that new pages can use without swapping; 0 on systems that do not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
