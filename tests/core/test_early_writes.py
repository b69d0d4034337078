"""Large files whose disk writes start early."""

import os
import sys

import pytest
from plasmid.utils.safe_files import MIN_EARLY_BYTES, PIECE_BYTES, write_early

SIZES = (5, MIN_EARLY_BYTES - 1, MIN_EARLY_BYTES, 2 * PIECE_BYTES + 7, 0)


@pytest.fixture
def advised(monkeypatch):
    """Ranges of the calls of `os.posix_fadvise`, and the size of the file at each."""
    calls = []

    def advise(handle, start, length, advice):
        assert advice == os.POSIX_FADV_DONTNEED
        calls.append((start, length, os.fstat(handle).st_size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return calls


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_data_is_written_at_the_current_position_and_large_pieces_early(tmp_path, monkeypatch, advised, platform):
    if platform != "linux":
        monkeypatch.delattr(os, "posix_fadvise")  # macOS does not have it
    monkeypatch.setattr(sys, "platform", platform)
    expected, ranges, position = b"head", [], 4
    with (tmp_path / "file").open("wb") as file:
        file.write(expected)
        for size in SIZES:
            data = os.urandom(size)
            write_early(file, memoryview(data))
            expected += data
            for start in range(0, size, PIECE_BYTES):
                length = min(PIECE_BYTES, size - start)
                if length >= MIN_EARLY_BYTES:
                    ranges.append((position + start, length, position + start + length))
            position += size
    assert (tmp_path / "file").read_bytes() == expected
    assert advised == (ranges if platform == "linux" else [])
    assert len(ranges) == 3
