"""Check the header of a GGUF file against the file's size, before the package that reads it takes memory by it.

Facts: the GGUF specification (ggml/docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type."""
STRING, ARRAY = 8, 9
MAX_ITEMS = 4_000_000
"""Items of all arrays of a file: tokens, merges and their scores. The package makes objects of each of them."""
MAX_DIMENSIONS = 4


def check_header(path: Path) -> None:
    """Raise `ValueError` if the header says more than the file holds, or `OSError` if the file cannot be read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Header(data).check()


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._items = data, 4, 0
        self._order = "<"

    def check(self) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if self._number("I") & 0xFFFF == 0:  # the version of a file in the other order of bytes
            self._order = ">"
        tensors, fields = self._number("Q"), self._number("Q")
        for _ in range(fields):
            self._skip_string()
            self._skip_value(self._number("I"))
        for _ in range(tensors):
            self._skip_string()
            dimensions = self._number("I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            elements = 1
            for _ in range(dimensions):
                elements *= self._number("Q")
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self._number("I"))]
            end = self._number("Q") + elements // block * size
            if end > len(self._data):
                raise ValueError(f"a tensor ends at byte {end} of {len(self._data)}")

    def _number(self, kind: str) -> int:
        size = struct.calcsize(kind)
        self._skip(size)
        number: int = struct.unpack_from(self._order + kind, self._data, self._at - size)[0]
        return number

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes are said to be at byte {self._at} of {len(self._data)}")
        self._at += size

    def _skip_string(self) -> None:
        self._skip(self._number("Q"))

    def _skip_value(self, kind: int) -> None:
        if kind == STRING:
            self._skip_string()
        elif kind == ARRAY:
            self._skip_array(self._number("I"), self._number("Q"))
        elif kind in SCALARS:
            self._skip(SCALARS[kind])
        else:
            raise ValueError(f"a value is of type {kind}, which there is not")

    def _skip_array(self, kind: int, count: int) -> None:
        self._items += count
        if self._items > MAX_ITEMS:
            raise ValueError(f"arrays have {self._items} items, more than {MAX_ITEMS}")
        if kind == STRING:
            for _ in range(count):
                self._skip_string()
        elif kind in SCALARS:
            self._skip(SCALARS[kind] * count)
        else:
            raise ValueError(f"an array is of type {kind}")  # the package takes arrays of arrays for one array
