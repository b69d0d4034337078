"""Read and write folders in torch's distributed format (`torch.distributed.checkpoint`), tensor by tensor.

torch's own functions need all tensors of a checkpoint in memory, or all names and shapes before the first tensor is
written. A stream of tensors can provide neither. The files are compatible with torch's.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from plasmid.errors import ModelError
from plasmid.utils.safe_files import replace_file, write_early
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
from torch.utils.serialization import config

from .collection import paused_collection
from .safe_pickle import check_lengths, load_metadata, refuse_objects

METADATA = ".metadata"
_Row = list[Any]
"""A stored part: name, dtype (empty for an object), size of the whole, offset, shape, file, position, bytes."""


class _Chunks:
    """The stored chunks of one tensor. Experts of all layers may be one tensor with thousands of them."""

    def __init__(self, entry: TensorStorageMetadata) -> None:
        self._chunks = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
        self.num_elements = sum(math.prod(chunk.sizes) for chunk in self._chunks)
        shape = (len(self._chunks), len(entry.size))
        low = np.array([chunk.offsets for chunk in self._chunks], np.int64).reshape(shape)
        sizes = np.array([chunk.sizes for chunk in self._chunks], np.int64).reshape(shape)
        self._ranges = list(zip(low.T.copy(), (low + sizes).T.copy(), strict=True))
        """First positions and ends of all chunks, by dimension."""

    def find(self, start: Sequence[int], shape: Sequence[int]) -> Iterator[ChunkStorageMetadata]:
        """Yield the chunks that overlap the region of ``shape`` at ``start``, in their order."""
        found = np.arange(len(self._chunks))
        for (low, high), first, length in zip(self._ranges, start, shape, strict=True):
            found = found[np.minimum(high[found], first + length) > np.maximum(low[found], first)]
        for index in found:
            yield self._chunks[index]


class DistributedFiles:
    """Reader of a folder. Needs memory for the requested tensor and one stored chunk of it."""

    def __init__(self, path: Path) -> None:
        """Read and check the metadata. Raises `ModelError`."""
        self.path = path
        metadata = load_metadata(path / METADATA)
        check_lengths(path, metadata)
        entries = metadata.state_dict_metadata
        self.tensors: Mapping[str, TensorStorageMetadata] = {
            name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        """Size, dtype and chunks of each tensor, by name."""
        self._stored: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset or ())): stored for index, stored in (metadata.storage_data or {}).items()
        }
        self._chunks: dict[str, _Chunks] = {}
        """Chunks of each tensor read so far, by name."""

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """Read a tensor, or its region of ``shape`` that begins at ``start``. Raises `ModelError`."""
        entry = self.tensors[name]
        start = [0] * len(entry.size) if start is None else list(start)
        shape = list(entry.size) if shape is None else list(shape)
        chunks = self._chunks_of(name)
        if chunks.num_elements < math.prod(entry.size):  # before allocating memory for missing data
            raise _incomplete_error(self.path, name, chunks.num_elements, math.prod(entry.size))
        result, filled = torch.empty(shape, dtype=entry.properties.dtype), 0
        for chunk in chunks.find(start, shape):
            low = [max(a, b) for a, b in zip(chunk.offsets, start, strict=True)]
            ends = zip(chunk.offsets, chunk.sizes, start, shape, strict=True)
            high = [min(offset + size, begin + length) for offset, size, begin, length in ends]
            part = self._load(name, chunk)[_window(low, high, chunk.offsets)]
            if list(part.shape) == shape:
                return part.contiguous()
            result[_window(low, high, start)] = part
            filled += part.numel()
        if filled != result.numel():
            raise _incomplete_error(self.path, name, filled, result.numel())
        return result

    def _chunks_of(self, name: str) -> _Chunks:
        if name not in self._chunks:
            self._chunks[name] = _Chunks(self.tensors[name])
        return self._chunks[name]

    def _load(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        stored = self._stored.get((name, tuple(chunk.offsets)))
        if stored is None:
            raise ModelError(f"{self.path}: {METADATA} has no location of {name}; the folder is corrupt")
        loaded = _read_part(self.path, name, stored)
        if loaded.shape != chunk.sizes:
            raise _mismatch_error(self.path / stored.relative_path, name)
        return loaded


class TensorReader(FileSystemReader):
    """Storage reader for `torch.distributed.checkpoint.load` that reads tensors only.

    torch's own reader unpickles ``.metadata`` and all non-tensor entries, which executes code named in the pickles.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the folder's metadata, which is read once. Raises `ModelError`."""
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        file = Path(self.path) / METADATA
        metadata = load_metadata(file)
        refuse_objects(file, metadata)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's tensors. Raises `ModelError`."""
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type != LoadItemType.TENSOR:
                raise ModelError(f"{self.path}: {name} is not a tensor")
            stored = self.storage_data[item.storage_index]
            part = _read_part(Path(self.path), name, stored)
            ends = [offset + length for offset, length in zip(item.storage_offsets, item.lengths, strict=True)]
            target = planner.resolve_tensor(item).detach()
            if len(ends) != part.ndim or any(end > size for end, size in zip(ends, part.shape, strict=True)):
                raise _mismatch_error(Path(self.path) / stored.relative_path, name)
            target.copy_(part[_window(list(item.storage_offsets), ends, [0] * part.ndim)])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_part(folder: Path, name: str, stored: Any) -> Tensor:
    """Read one stored chunk of a tensor. Raises `ModelError`."""
    if getattr(stored, "transform_descriptors", None):
        raise ModelError(f"{folder}: {name} is compressed, which is not supported")
    file = folder / stored.relative_path
    try:
        with file.open("rb", buffering=0) as stream:
            data = io.BufferedReader(_Window(stream, stored.offset, stored.length))
            refuse_compressed(data)
            loaded = torch.load(data, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelError(f"{file}: is missing; according to {METADATA} it contains {name}") from None
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ModelError(f"{file}: cannot read {name}; the file is truncated or corrupt") from error
    if not isinstance(loaded, Tensor):
        raise _mismatch_error(file, name)
    return loaded


class _Window(io.RawIOBase):
    """A region of a file, from which `torch.load` reads into the memory of the tensor."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._handle, self._start, self._position = file.fileno(), start, 0
        self._length = max(0, min(length, os.fstat(self._handle).st_size - start))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        count = os.preadv(self._handle, [wanted], self._start + self._position)
        self._position += count
        return count


def refuse_compressed(stream: IO[bytes]) -> None:
    """Raise `UnpicklingError` if the `torch.save` archive in the stream is larger uncompressed than the stream."""
    size = stream.seek(0, os.SEEK_END)
    with zipfile.ZipFile(stream) as archive:
        if sum(member.file_size for member in archive.infolist()) > size:
            raise pickle.UnpicklingError("the data is compressed, which torch never does")
    stream.seek(0)


def _mismatch_error(file: Path, name: str) -> ModelError:
    return ModelError(f"{file}: {name} does not match {METADATA}; the file is corrupt or belongs to another checkpoint")


def _incomplete_error(folder: Path, name: str, stored: int, whole: int) -> ModelError:
    return ModelError(f"{folder}: {name} is incomplete: {stored} of {whole} numbers are stored")


def _window(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _narrow_storage(tensor: Tensor) -> Tensor:
    """Return the contiguous tensor with a storage of its size, which shares the memory."""
    data = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else tensor.clone()
    return data.view(tensor.dtype).reshape(tensor.shape)


class _Archive(io.RawIOBase):
    """File for `torch.save` that collects what is written, without copying the memory of the saved tensor."""

    def __init__(self, value: object) -> None:
        self._memory = (value.data_ptr(), value.nbytes) if isinstance(value, Tensor) and value.numel() else None
        self.pieces: list[memoryview | bytearray] = [bytearray()]

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        if self._is_tensor(view):
            self.pieces += [view, bytearray()]
        else:  # one of about 40 headers
            self.pieces[-1] += view  # type: ignore[operator]
        return len(view)

    def _is_tensor(self, view: memoryview) -> bool:
        if self._memory is None or self._memory[1] != len(view):
            return False
        return bool(self._memory[0] == np.frombuffer(view, np.uint8).ctypes.data)


def _pickle(value: object) -> list[memoryview]:
    """Return the output of `torch.save` in pieces; the memory of a tensor is not copied."""
    data = _Archive(value)
    # without CRC-32, which takes as long as writing, and which torch.load ignores
    with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(value, cast(IO[bytes], data))  # not to the file: it would not raise OSError if the disk is full
    return [memoryview(piece) for piece in data.pieces]


class DistributedWriter:
    """Writer of a folder from a stream of tensors. The folder cannot be read before `finish`. Syncs no data."""

    def __init__(self, folder: Path, *, max_file_bytes: int, part: int = 0) -> None:
        """Write files of at most ``max_file_bytes``; only a tensor that is larger gets a larger file.

        ``part`` is the number of this writer if several write into the folder.
        """
        self._folder, self._limit, self._part = folder, max_file_bytes, part
        self._rows: list[_Row] = []
        self._file: io.BufferedWriter | None = None
        self._files: list[str] = []

    def add(
        self, name: str, tensor: Tensor, *, start: Sequence[int] | None = None, size: Sequence[int] | None = None
    ) -> None:
        """Write a tensor, or the part at ``start`` of a tensor of ``size``. Raises `ModelError` or `OSError`."""
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = _narrow_storage(tensor)  # torch.save writes the whole storage of which a tensor is a view
        offset, whole = start or [0] * tensor.ndim, size or tensor.shape
        dtype = str(tensor.dtype).removeprefix("torch.")
        place = self._append(_pickle(tensor))
        self._rows.append([name, dtype, list(whole), list(offset), list(tensor.shape), *place])

    def add_object(self, names: Iterable[str], value: object) -> None:
        """Pickle an object once and store it under several names. Raises `OSError`."""
        pieces = _pickle(value)
        self._rows += [[name, "", [], [], [], *self._append(pieces)] for name in names]

    def record(self) -> dict[str, Any]:
        """Finish the files and return their index for `write_metadata`, as JSON types. Raises `OSError`."""
        self.close()
        return {"files": self._files, "rows": self._rows}

    def finish(self) -> int:
        """Write the metadata of a folder with one writer; see `write_metadata`."""
        return write_metadata(self._folder, [self.record()])

    def close(self) -> None:
        """Close the current file; called by `finish`."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, pieces: Sequence[memoryview]) -> tuple[str, int, int]:
        length = sum(map(len, pieces))
        if self._file is not None and self._file.tell() and self._file.tell() + length > self._limit:
            self.close()
        if self._file is None:
            self._files.append(f"__{self._part}_{len(self._files)}.distcp")
            self._file = (self._folder / self._files[-1]).open("wb")
        offset = self._file.tell()
        for piece in pieces:
            write_early(self._file, piece)
        return self._files[-1], offset, length


@paused_collection()
def write_metadata(folder: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write the metadata of a folder from the records of its writers, and return the number of tensors.

    Raises `ModelError` if a tensor was written twice or in different dtypes, and `OSError`.
    """
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, kind, whole, start, shape, *place in (row for record in records for row in record["rows"]):
        if not kind:
            entries[name], stored[MetadataIndex(name)] = BytesStorageMetadata(), _StorageInfo(*place)
            continue
        dtype, offset = getattr(torch, kind), torch.Size(start)
        entry = entries.setdefault(name, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(whole), []))
        if entry.properties.dtype != dtype:
            raise ModelError(f"{name}: its parts have different dtypes: {entry.properties.dtype} and {dtype}")
        if MetadataIndex(name, offset) in stored:
            raise ModelError(f"{name}: occurs twice in the source")
        entry.chunks.append(ChunkStorageMetadata(offsets=offset, sizes=torch.Size(shape)))
        stored[MetadataIndex(name, offset)] = _StorageInfo(*place)
    metadata = Metadata(state_dict_metadata=entries, planner_data={}, storage_data=stored)
    with replace_file(folder / METADATA, durable=True) as file:
        pickle.dump(metadata, file)
    return sum(isinstance(entry, TensorStorageMetadata) for entry in entries.values())
