"""Read the ``.metadata`` pickle of torch's distributed format without executing code from it.

Nothing else may unpickle such a file: torch's own reader calls any function that the pickle names. `torch.load` with
``weights_only`` reads only its own archives, and limits neither memory nor the time to hash a key.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from plasmid.errors import ModelError, one_line

from .collection import paused_collection

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

ALLOWED = {
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "torch": {"Size", "device", "dtype"},
    "torch._C": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}
"""Allowed names by module. Torch dtypes are allowed as well."""
OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK",
    "NONE NEWTRUE NEWFALSE",
    "BININT BININT1 BININT2 LONG1 BINFLOAT",
    "SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES",
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS",
    "EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS",
    "MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET",
    "GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD",
)
"""Allowed pickle opcodes. None of them allocates more memory than the size of the file justifies."""
MAX_DIMS = 64
"""Maximum number of dimensions of a tensor in torch."""
Load = Callable[[Any], None]


class _Unpickler(pickle._Unpickler):
    """The pure-Python unpickler, whose opcodes can be checked one by one."""

    dispatch: ClassVar[dict[int, Load]]
    read: Callable[[int], bytes]
    stack: list[Any]
    memo: dict[int, Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._size = len(data)

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if name in ALLOWED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")

    def refuse(self) -> None:
        raise pickle.UnpicklingError("it has an instruction that is not allowed")

    def put(self) -> None:
        """Memoize a value under a bounded number; the C unpickler would allocate a table of that size."""
        number = int.from_bytes(self.read(4), "little")
        if number > self._size:
            raise pickle.UnpicklingError(f"its memo index {number} exceeds its size in bytes")
        self.memo[number] = self.stack[-1]

    def reduce(self) -> None:
        if self.stack[-2] in (OrderedDict, defaultdict) and any(not isinstance(a, type) for a in self.stack[-1]):
            raise pickle.UnpicklingError("it fills a dictionary in a way that is not allowed")
        _LOAD["REDUCE"](self)

    def build(self) -> None:
        """Set the fields of a dataclass instance; refuse classes and constants, which the whole process shares."""
        if isinstance(self.stack[-2], type) or not is_dataclass(self.stack[-2]):
            raise pickle.UnpicklingError(f"it modifies {type(self.stack[-2]).__name__}, which is not allowed")
        _LOAD["BUILD"](self)

    def set_item(self) -> None:
        _check_key(self.stack[-2])
        _LOAD["SETITEM"](self)

    def set_items(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        _LOAD["SETITEMS"](self)


def _check_key(key: object) -> None:
    """Allow keys of a few types only: hashing nested tuples may take forever."""
    if isinstance(key, _index_class()):
        fine = isinstance(key.fqn, str) and _is_size(() if key.offset is None else key.offset)
    else:
        fine = isinstance(key, str | int)
    if not fine:
        raise pickle.UnpicklingError(f"it has a key of type {type(key).__name__}, which is not allowed")


@functools.cache
def _index_class() -> type[MetadataIndex]:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex


_NAMES = [name for group in OPCODES for name in group.split()]
_LOAD: dict[str, Load] = {name: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _NAMES}
_Unpickler.dispatch = (
    {code: _Unpickler.refuse for code in range(256)}
    | {getattr(pickle, name)[0]: load for name, load in _LOAD.items()}
    | {
        pickle.LONG_BINPUT[0]: _Unpickler.put,
        pickle.REDUCE[0]: _Unpickler.reduce,
        pickle.BUILD[0]: _Unpickler.build,
        pickle.SETITEM[0]: _Unpickler.set_item,
        pickle.SETITEMS[0]: _Unpickler.set_items,
    }
)


@paused_collection()
def load_metadata(file: Path) -> Metadata:
    """Read a folder's ``.metadata``.

    Raises `ModelError` if it cannot be read, is not checkpoint metadata, or has parts of tensors that lie outside of
    the tensor or the folder, or in fewer bytes than their elements need.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        metadata = _Unpickler(file.read_bytes()).load()
    except FileNotFoundError:
        raise ModelError(f"{file.parent}: not in torch's distributed format (it has no {file.name})") from None
    except Exception as error:  # boundary: a corrupt pickle may raise anything
        raise ModelError(f"{file}: cannot be read: {one_line(error)}") from error
    if not isinstance(metadata, Metadata):
        raise ModelError(f"{file}: contains {type(metadata).__name__}, not the metadata of a checkpoint")
    try:
        _check(metadata)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: is corrupt: {one_line(error)}") from None
    return metadata


def check_lengths(folder: Path, metadata: Metadata) -> None:
    """Raise `ModelError` if the metadata claims more bytes than a file has, because readers allocate what it claims."""
    ends: dict[str, tuple[int, str]] = {}
    filled: Counter[str] = Counter()
    for index, place in (metadata.storage_data or {}).items():
        name = place.relative_path
        ends[name] = max(ends.get(name, (0, "")), (place.offset + place.length, index.fqn))
        filled[name] += place.length
    for name, (end, tensor) in ends.items():
        file = folder / name
        if file.is_file() and max(end, filled[name]) > file.stat().st_size:
            raise ModelError(f"{file}: cannot read {tensor}; the file is truncated or corrupt")


def refuse_objects(file: Path, metadata: Metadata) -> None:
    """Raise `ModelError` if the folder has non-tensor entries, which torch would unpickle, executing their code."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ModelError(f"{file}: {name} is a pickled object, not a tensor; loading it could execute code")


def _check(metadata: Metadata) -> None:
    """Raise `ValueError`, or the error that a wrong type causes, if a region lies outside of its bounds."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    stored: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, place in (metadata.storage_data or {}).items():
        name = place.relative_path
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise ValueError(f"{str(name)!r:.80} is not the name of a file in the folder")
        if not _is_size((place.offset, place.length)):
            raise ValueError(f"{index.fqn} has the offset {place.offset!r:.40}")
        stored[index.fqn, tuple(index.offset or ())] = place
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r:.80} is not a name")
        if not isinstance(entry, BytesStorageMetadata):
            _check_tensor(name, entry, stored)


def _check_tensor(name: str, entry: Any, stored: Mapping[tuple[str, tuple[int, ...]], Any]) -> None:
    import torch

    size, dtype = entry.size, entry.properties.dtype
    if not (_is_size(size) and isinstance(dtype, torch.dtype)):
        raise ValueError(f"{name} has the size {size!r:.40}")
    if len(size) > MAX_DIMS:
        raise ValueError(f"{name} has {len(size)} dimensions")
    filled: set[tuple[int, ...]] = set()
    for chunk in entry.chunks:
        within = _is_size(chunk.offsets) and _is_size(chunk.sizes) and len(chunk.offsets) == len(chunk.sizes)
        ends = zip(chunk.offsets, chunk.sizes, size, strict=True) if within else ()
        if not within or any(offset + length > whole for offset, length, whole in ends):
            raise ValueError(f"a part of {name} is outside of its shape")
        if math.prod(chunk.sizes) and tuple(chunk.offsets) in filled:
            raise ValueError(f"two parts of {name} begin at the same place")
        filled.add(tuple(chunk.offsets))
        place = stored.get((name, tuple(chunk.offsets)))
        if place is None or getattr(place, "transform_descriptors", None):
            continue  # reported when the part is read
        if math.prod(chunk.sizes) * dtype.itemsize > place.length:
            raise ValueError(f"{name}: {math.prod(chunk.sizes)} numbers do not fit into {place.length} bytes")


def _is_size(value: object) -> bool:
    return isinstance(value, tuple) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)
