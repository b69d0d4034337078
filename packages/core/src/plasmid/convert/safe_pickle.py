"""What torch's distributed format keeps in a pickle, read without running code that somebody put there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, one_line

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

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
"""Modules and names that may be in it. Types of tensors are allowed besides."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if name in ALLOWED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in it")


def load_metadata(file: Path) -> Metadata:
    """The ``.metadata`` of a folder. Raises `ModelError`."""
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except FileNotFoundError:
        raise ModelError(f"{file.parent}: is no folder of torch's distributed format (it has no {file.name})") from None
    except Exception as error:  # boundary: a damaged pickle may raise anything
        raise ModelError(f"{file}: cannot be read: {one_line(error)}") from error
    if not isinstance(metadata, Metadata):
        raise ModelError(f"{file}: holds {type(metadata).__name__}, not the description of a checkpoint")
    return metadata
