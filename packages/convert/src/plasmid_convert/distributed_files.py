"""Folders in torch's distributed format (`torch.distributed.checkpoint`), read and written tensor by tensor.

torch's own functions want all tensors of a checkpoint in memory at once. Files are the same in both directions.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import ModelError
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from .safe_pickle import check_lengths, load_metadata, refuse_objects

METADATA = ".metadata"


class DistributedFiles:
    """A folder that is read. Holds one saved part of a tensor in memory besides the tensor that is asked for."""

    def __init__(self, path: Path) -> None:
        """Read which tensors there are. Raises `ModelError`."""
        self.path = path
        metadata = load_metadata(path / METADATA)
        check_lengths(path, metadata)
        entries = metadata.state_dict_metadata
        self.tensors: Mapping[str, TensorStorageMetadata] = {
            name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        """Size, type and parts of every tensor, by name."""
        self._stored: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset or ())): stored for index, stored in (metadata.storage_data or {}).items()
        }

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor, or the region of ``shape`` in it that begins at ``start``. Raises `ModelError`."""
        entry = self.tensors[name]
        start = [0] * len(entry.size) if start is None else list(start)
        shape = list(entry.size) if shape is None else list(shape)
        there = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if there < math.prod(entry.size):  # before memory is taken for what is not there
            raise _not_whole(self.path, name, there, math.prod(entry.size))
        result, filled = torch.empty(shape, dtype=entry.properties.dtype), 0
        for chunk in entry.chunks:
            low = [max(a, b) for a, b in zip(chunk.offsets, start, strict=True)]
            ends = zip(chunk.offsets, chunk.sizes, start, shape, strict=True)
            high = [min(offset + size, begin + length) for offset, size, begin, length in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            part = self._load(name, chunk)[_window(low, high, chunk.offsets)]
            if list(part.shape) == shape:
                return part.contiguous()
            result[_window(low, high, start)] = part
            filled += part.numel()
        if filled != result.numel():
            raise _not_whole(self.path, name, filled, result.numel())
        return result

    def _load(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        stored = self._stored.get((name, tuple(chunk.offsets)))
        if stored is None:
            raise ModelError(f"{self.path}: {METADATA} does not say where {name} lies; the folder is damaged")
        loaded = _read_part(self.path, name, stored)
        if loaded.shape != chunk.sizes:
            raise _another(self.path / stored.relative_path, name)
        return loaded


class TensorReader(FileSystemReader):
    """Reads a folder for `torch.distributed.checkpoint.load`, and nothing but tensors.

    torch's own reader unpickles ``.metadata`` and whatever is no tensor, which runs the code that a pickle names.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds. Raises `ModelError`."""
        file = Path(self.path) / METADATA
        metadata = load_metadata(file)
        refuse_objects(file, metadata)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan. Raises `ModelError`."""
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type != LoadItemType.TENSOR:
                raise ModelError(f"{self.path}: {name} is no tensor")
            stored = self.storage_data[item.storage_index]
            part = _read_part(Path(self.path), name, stored)
            ends = [offset + length for offset, length in zip(item.storage_offsets, item.lengths, strict=True)]
            target = planner.resolve_tensor(item).detach()
            if len(ends) != part.ndim or any(end > size for end, size in zip(ends, part.shape, strict=True)):
                raise _another(Path(self.path) / stored.relative_path, name)
            target.copy_(part[_window(list(item.storage_offsets), ends, [0] * part.ndim)])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_part(folder: Path, name: str, stored: Any) -> Tensor:
    """One saved part of a tensor. Raises `ModelError`."""
    if getattr(stored, "transform_descriptors", None):
        raise ModelError(f"{folder}: {name} was compressed when it was saved, which is not supported")
    file = folder / stored.relative_path
    try:
        with file.open("rb") as stream:
            stream.seek(stored.offset)
            data = io.BytesIO(stream.read(stored.length))
        with zipfile.ZipFile(data) as archive:
            if sum(member.file_size for member in archive.infolist()) > stored.length:
                raise ModelError(f"{file}: {name} is compressed, which torch never does; the file is damaged")
        data.seek(0)
        loaded = torch.load(data, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelError(f"{file}: is missing; {METADATA} says that {name} is in it") from None
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ModelError(f"{file}: {name} cannot be read from it; the file is cut off or damaged") from error
    if not isinstance(loaded, Tensor):
        raise _another(file, name)
    return loaded


def _another(file: Path, name: str) -> ModelError:
    return ModelError(f"{file}: {name} is not what {METADATA} says; the file is damaged or another one")


def _not_whole(folder: Path, name: str, there: int, whole: int) -> ModelError:
    return ModelError(f"{folder}: {name} is not whole: {there} of {whole} numbers are there")


def _window(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


class DistributedWriter:
    """Writes such a folder as tensors come. Nothing reads it before `finish`."""

    def __init__(self, folder: Path, *, max_file_bytes: int) -> None:
        """A file exceeds the limit only if a single tensor does."""
        self._folder, self._limit = folder, max_file_bytes
        self._entries: dict[str, Any] = {}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}
        self._file: io.BufferedWriter | None = None
        self._num_files = 0

    def add(
        self, name: str, tensor: Tensor, *, start: Sequence[int] | None = None, size: Sequence[int] | None = None
    ) -> None:
        """Write a tensor, or the part of a tensor of ``size`` that begins at ``start``. Raises `OSError`."""
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # else all of what it is a part of would be written
        offset = torch.Size([0] * tensor.ndim if start is None else start)
        entry = self._entries.get(name)
        if entry is None:
            properties = TensorProperties(dtype=tensor.dtype)
            entry = TensorStorageMetadata(properties, torch.Size(tensor.shape if size is None else size), [])
            self._entries[name] = entry
        if entry.properties.dtype != tensor.dtype:
            raise ModelError(f"{name}: its parts are of several types: {entry.properties.dtype} and {tensor.dtype}")
        if any(chunk.offsets == offset for chunk in entry.chunks):
            raise ModelError(f"{name}: comes twice in the source")
        entry.chunks.append(ChunkStorageMetadata(offsets=offset, sizes=tensor.shape))
        self._stored[MetadataIndex(name, offset)] = self._append(tensor)

    def add_object(self, name: str, value: object) -> None:
        """Write what is no tensor. Raises `OSError`."""
        self._entries[name] = BytesStorageMetadata()
        self._stored[MetadataIndex(name)] = self._append(value)

    def finish(self) -> int:
        """Say what is where; returns the number of tensors. Raises `OSError`."""
        self.close()
        metadata = Metadata(state_dict_metadata=self._entries, planner_data={}, storage_data=self._stored)
        with (self._folder / METADATA).open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        return sum(isinstance(entry, TensorStorageMetadata) for entry in self._entries.values())

    def close(self) -> None:
        """Close the file that is written; `finish` does it."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _append(self, value: object) -> _StorageInfo:
        data = io.BytesIO()  # written by ourselves: torch gives a full disk no OSError
        torch.save(value, data)
        length = data.getbuffer().nbytes
        if self._file is not None and self._file.tell() and self._file.tell() + length > self._limit:
            self.close()
        if self._file is None:
            self._file = (self._folder / f"__0_{self._num_files}.distcp").open("wb")
            self._num_files += 1
        offset = self._file.tell()
        self._file.write(data.getbuffer())
        return _StorageInfo(f"__0_{self._num_files - 1}.distcp", offset, length)
