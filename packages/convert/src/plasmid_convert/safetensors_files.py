"""Read safetensors files tensor by tensor, and write files whose tensors are known in advance.

The library maps files into memory, whose pages count as memory of the process until the file is closed. To write a
file, it needs all of its tensors at once. The format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import os
import struct
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from plasmid.components import TensorInfo
from plasmid.errors import ModelError
from plasmid.utils.safe_files import replace_file, write_early
from plasmid_models.folder import dtype_of, open_folder
from plasmid_models.quantized.slices import QuantizedSlice
from safetensors.torch import _TYPES
from torch import Tensor

KINDS = {dtype: kind for kind, dtype in _TYPES.items()}
"""Names of dtypes in headers."""


class _Place(NamedTuple):
    file: Path
    start: int
    """Position of the first byte in the file."""
    dtype: torch.dtype
    info: TensorInfo
    """The tensor in the file, before a cast."""


class OpenFolder:
    """Weight files opened for reading by name. Implements `plasmid.components.OpenCheckpoint`."""

    def __init__(self, files: Iterable[Path], dtype: torch.dtype | None) -> None:
        """Read the headers of intact files; floating-point tensors are cast to ``dtype`` unless it is None."""
        self._places = [place for file in files for place in _read_header(file)]
        self._dtype, self._buffers = dtype, _Buffers()
        self.tensors: Sequence[TensorInfo] = [
            describe(info.name, dtype if dtype and stored.is_floating_point else stored, info.shape)
            for _, _, stored, info in self._places
        ]

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for place in self._places:
            if place.info.name in names:
                is_cast = self._dtype is not None and place.dtype.is_floating_point
                tensor = _read(place, self._buffers)
                yield place.info.name, tensor.to(self._dtype) if is_cast else tensor
                del tensor  # so that its buffer can be free


class OpenQuantized:
    """A folder with quantized weights, which are dequantized when read. Implements `OpenCheckpoint`."""

    def __init__(self, path: Path, dtype: torch.dtype | None) -> None:
        """Cast floating-point tensors to ``dtype``; with None, quantized ones to the dtype of the config."""
        self._path, self._dtype = path, dtype
        self._plain = dtype or getattr(torch, dtype_of("model", path))
        with open_folder("model", path) as found:
            self.tensors: Sequence[TensorInfo] = [
                describe(name, self._cast(part, torch.empty(0, dtype=_TYPES[part.get_dtype()])).dtype, part.get_shape())
                for name, part in found.items()
            ]

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        with open_folder("model", self._path) as found:
            for name, part in found.items():
                if name in names:
                    yield name, self._cast(part, part[...])

    def _cast(self, part: object, tensor: Tensor) -> Tensor:
        is_cast = isinstance(part, QuantizedSlice) or (self._dtype is not None and tensor.is_floating_point())
        return tensor.to(self._plain) if is_cast else tensor


def cast(tensor: Tensor, dtype: str | None) -> Tensor:
    """Cast a floating-point tensor to the torch dtype of this name. Returns other tensors as they are, all for None."""
    return tensor.to(getattr(torch, dtype)) if dtype is not None and tensor.is_floating_point() else tensor


def describe(name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorInfo:
    """Return the description of a tensor."""
    size = tuple(shape)
    return TensorInfo(name, str(dtype).removeprefix("torch."), size, math.prod(size) * dtype.itemsize)


def write_file(path: Path, infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a file with the tensors ``infos``, given in any order. Keeps one tensor in memory. Does not sync the file.

    Raises `ModelError` if other tensors are given, and `OSError`.
    """
    header, places = _make_header(infos)
    missing = {info.name: info for info in infos}
    with replace_file(path) as file:
        file.write(header)
        for name, tensor in tensors:
            if missing.pop(name, None) != describe(name, tensor.dtype, tensor.shape):
                raise ModelError(f"{name}: the source has this tensor twice, or not as its header describes it")
            file.seek(len(header) + places[name])
            write_early(file, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if missing:
            raise ModelError(f"{next(iter(missing))}: the source does not have this tensor, which its header lists")


def _make_header(infos: Iterable[TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """Return the start of a file, and where the data of each tensor begin after it; aligned for every dtype."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for info in sorted(infos, key=lambda info: (-getattr(torch, info.dtype).itemsize, info.name)):
        kind = KINDS.get(getattr(torch, info.dtype))
        if kind is None:
            raise ModelError(f"{info.name}: safetensors does not support dtype {info.dtype}")
        places[info.name], end = end, end + info.num_bytes
        header[info.name] = {
            "dtype": kind,
            "shape": list(info.shape),
            "data_offsets": [places[info.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places


def _read_header(file: Path) -> Iterator[_Place]:
    """Return the tensors of a file that the library found to be intact, in the order of their data."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        entries = json.loads(opened.read(length))
    entries.pop("__metadata__", None)
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, (start, end) = _TYPES.get(entry["dtype"]), entry["data_offsets"]
        if dtype is None:
            raise ModelError(f"{file}: {name} has dtype {entry['dtype']}, which torch does not have")
        info = describe(name, dtype, entry["shape"])
        if info.num_bytes != end - start:
            raise ModelError(f"{file}: {name} has dtype {entry['dtype']}, which cannot be read")
        yield _Place(file, 8 + length + start, dtype, info)


@dataclass(slots=True)
class _Buffer:
    """Memory of one tensor at a time."""

    data: npt.NDArray[np.uint8]
    taken: weakref.ref[npt.NDArray[np.uint8]] | None = None
    """The part that was taken last, which lives as long as a tensor that uses it."""

    @property
    def is_free(self) -> bool:
        return self.taken is None or self.taken() is None


class _Buffers:
    """Memory for tensors, reused for later ones: getting new pages takes longer than reading a file into them."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return uninitialized bytes of the smallest free buffer that is large enough, or of a new one."""
        fitting = [buffer for buffer in self._buffers if buffer.is_free and len(buffer.data) >= num_bytes]
        if not fitting:  # it replaces the free ones, so that there are only as many as tensors in use
            self._buffers = [buffer for buffer in self._buffers if not buffer.is_free]
            fitting = [_Buffer(np.empty(num_bytes, np.uint8))]
            self._buffers += fitting
        buffer = min(fitting, key=lambda one: len(one.data))
        part = buffer.data[:num_bytes]
        buffer.taken = weakref.ref(part)
        return torch.from_numpy(part)


def _read(place: _Place, buffers: _Buffers) -> Tensor:
    if not place.info.num_bytes:
        return torch.empty(place.info.shape, dtype=place.dtype)
    data = buffers.take(place.info.num_bytes)
    with place.file.open("rb", buffering=0) as file:
        file.seek(place.start)
        _fill(file, data.numpy().data, place)
    return data.view(place.dtype).reshape(place.info.shape)


def _fill(file: IO[bytes], rest: memoryview, place: _Place) -> None:
    while rest:
        count = os.readv(file.fileno(), [rest[: 1 << 30]])
        if not count:
            raise ModelError(f"{place.file}: is not a complete safetensors file: it ends within {place.info.name}")
        rest = rest[count:]
