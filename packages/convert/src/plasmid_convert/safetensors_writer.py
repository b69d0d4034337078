"""Writes safetensors files tensor by tensor: the library's own writer wants a whole file's tensors in memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from plasmid.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Torch name -> name in a safetensors header."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    item_size: int
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class _Shard:
    """One file. The header needs all sizes, so data wait in a file of their own until `finish`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self.entries: list[_Entry] = []
        self._data = path.with_suffix(".data")
        self._file = self._data.open("wb")

    def add(self, name: str, tensor: Tensor) -> None:
        import torch

        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ModelError(f"{name}: safetensors have no type for {dtype}")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        size = flat.numel() * flat.element_size()
        entry = _Entry(name, DTYPES[dtype], flat.element_size(), tuple(tensor.shape), self.num_bytes, size)
        self._file.write(data)
        self.entries.append(entry)
        self.num_bytes += size

    def finish(self) -> None:
        self._file.close()
        # the widest type first, so that every tensor begins at a multiple of its item size
        ordered = sorted(self.entries, key=lambda e: (-e.item_size, e.start))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for e in ordered:
            header[e.name] = {"dtype": e.dtype, "shape": e.shape, "data_offsets": [end, end := end + e.num_bytes]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with self._data.open("rb") as data, self.path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for e in ordered:
                _copy(data, file, start=e.start, num_bytes=e.num_bytes)
            file.flush()
            os.fsync(file.fileno())
        self._data.unlink()

    def abandon(self) -> None:
        """Close the file of a shard that will not be finished."""
        self._file.close()


def write_safetensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_shard_bytes: int) -> int:
    """Write ``model.safetensors``, or numbered shards and their index; returns the number of tensors.

    Holds one tensor in memory. A shard exceeds the limit only if a single tensor does. Raises `ModelError` for a name
    that comes twice, and `OSError`.
    """
    shards = [_Shard(folder / "shard-1.safetensors")]
    seen: set[str] = set()
    try:
        for name, tensor in tensors:
            if name in seen:
                raise ModelError(f"{name}: comes twice in the source")
            seen.add(name)
            size = tensor.numel() * tensor.element_size()
            if shards[-1].num_bytes and shards[-1].num_bytes + size > max_shard_bytes:
                shards[-1].finish()
                shards.append(_Shard(folder / f"shard-{len(shards) + 1}.safetensors"))
            shards[-1].add(name, tensor)
        shards[-1].finish()
    except BaseException:
        shards[-1].abandon()
        raise
    _name(folder, shards)
    return len(seen)


def _name(folder: Path, shards: list[_Shard]) -> None:
    if len(shards) == 1:
        shards[0].path.rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard.path.rename(folder / name)
        weight_map |= {e.name: name for e in shard.entries}
    total = sum(shard.num_bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy(source: BinaryIO, target: BinaryIO, *, start: int, num_bytes: int, chunk: int = 1 << 24) -> None:
    source.seek(start)
    for done in range(0, num_bytes, chunk):
        target.write(source.read(min(chunk, num_bytes - done)))
