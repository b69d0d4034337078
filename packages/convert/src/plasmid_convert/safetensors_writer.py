"""Write safetensors files tensor by tensor.

The library's own writer needs all tensors of a file at once, so they are collected in a temporary file that is
memory-mapped for the library.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.errors import ModelError
from plasmid.utils.safe_files import apply_umask, check_replaceable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INDEX = "model.safetensors.index.json"
ALIGNMENT = 16
"""Alignment of tensors in the temporary file, in bytes, so that each can be viewed in its dtype."""


class _Shard:
    """One output file. The header needs all sizes, so the data is kept in a temporary file until `finish`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self.tensors: dict[str, tuple[torch.dtype, torch.Size, int]] = {}
        """Dtype, shape and offset in the temporary file, by name."""
        self._data = path.with_suffix(".data")
        self._file = self._data.open("wb")

    def add(self, name: str, tensor: Tensor) -> None:
        import torch
        from safetensors.torch import _SIZE

        if tensor.dtype not in _SIZE:
            raise ModelError(f"{name}: safetensors does not support dtype {str(tensor.dtype).removeprefix('torch.')}")
        self.tensors[name] = tensor.dtype, tensor.shape, self._file.tell()
        if tensor.numel():
            self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._file.write(bytes(-tensor.nbytes % ALIGNMENT))
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self._file.close()
        size = self._data.stat().st_size
        data = torch.from_file(str(self._data), size=size, dtype=torch.uint8)
        places = {name: data[start : start + s.numel() * d.itemsize] for name, (d, s, start) in self.tensors.items()}
        tensors = {name: places[name].view(d).view(s) for name, (d, s, _) in self.tensors.items()}
        check_replaceable(self.path)  # the library writes a temporary file and renames it
        try:
            save_file(tensors, self.path, metadata={"format": "pt"})
            apply_umask(self.path)
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from None
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self._data.unlink()

    def abandon(self) -> None:
        """Close the temporary file of a shard that will not be finished."""
        self._file.close()


def write_safetensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_shard_bytes: int) -> int:
    """Write ``model.safetensors``, or numbered shards and their index, and return the number of tensors.

    Keeps one tensor in memory. A shard exceeds the limit only if a single tensor does. Raises `ModelError` for a
    duplicate name, and `OSError`.
    """
    shards = [_Shard(folder / "shard-1.safetensors")]
    seen: set[str] = set()
    try:
        for name, tensor in tensors:
            if name in seen:
                raise ModelError(f"{name}: occurs twice in the source")
            seen.add(name)
            if shards[-1].num_bytes and shards[-1].num_bytes + tensor.nbytes > max_shard_bytes:
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
        weight_map |= dict.fromkeys(shard.tensors, name)
    write_index(folder, weight_map, sum(shard.num_bytes for shard in shards))


def write_index(folder: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Write the index of several files with ``num_bytes`` of tensors in total. Raises `OSError`."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
