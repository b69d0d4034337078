"""Locations of a module's weights in Megatron's distributed format (`torch_dist`), and reading of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from plasmid.errors import ModelError
from plasmid_convert.distributed.files import DistributedFiles
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

MODEL_PREFIXES = ("decoder.", "embedding.", "output_layer.", "mtp.", "score.")
"""Prefixes of the names of a language model's weights; those of optimizers and critics differ."""
ADAPTER_PREFIX = "adapter."
"""Prefix of the names of an adapter's matrices. The checkpoint of an adapter contains no other weights."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Weights with a row per token. Their rows are padded, so that they can be split over tensor-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A region of a tensor in the checkpoint, and the part of a weight that is stored there."""

    key: str
    size: tuple[int, ...]
    """Shape of the whole tensor, in which layers and experts are stacked."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: Tensor
    """The part of the weight; may be on the meta device."""


def sharding_metadata() -> dict[str, Any]:
    """Return Megatron's options for names and stacking of weights; the process groups must exist."""
    return {"singleton_local_shards": False, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def find_entries(chunk: nn.Module) -> tuple[dict[str, list[Place]], list[ShardedObject]]:
    """Return the places of each weight, by its name in the module, and Megatron's entries that are not tensors.

    Several places of a weight are consecutive rows.
    """
    state: dict[str, Any] = chunk.sharded_state_dict(prefix="", metadata=sharding_metadata())  # type: ignore[operator]
    places = {name: [_place(one) for one in _build(entry)] for name, entry in state.items() if _is_tensor(entry)}
    return places, [entry for entry in state.values() if isinstance(entry, ShardedObject)]


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, ShardedTensor | ShardedTensorFactory)


def _build(entry: Any) -> list[ShardedTensor]:
    return list(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]


def _place(entry: ShardedTensor) -> Place:
    return Place(
        key=entry.key,
        size=tuple(entry.global_shape),
        start=tuple(entry.global_offset),
        shape=(1,) * entry.prepend_axis_num + tuple(entry.local_shape),
        data=entry.data,
    )


class TorchDist:
    """A folder in the distributed format, whose weights are read region by region."""

    def __init__(self, path: Path, error_prefix: str) -> None:
        """Open the folder. Raises `ModelError`; ``error_prefix`` starts every error and ends with the subject, "it"."""
        self._files, self._error_prefix = DistributedFiles(path), error_prefix
        self.names = {name for name in self._files.tensors if name.startswith(MODEL_PREFIXES)}
        """Names of all weights of the language model."""
        self.has_adapter = any(name.startswith(ADAPTER_PREFIX) for name in self._files.tensors)
        """True if the folder is the checkpoint of an adapter."""

    def has(self, parts: Sequence[Place]) -> bool:
        """Return True if the folder contains all these parts."""
        return all(place.key in self._files.tensors for place in parts)

    def read(self, parts: Sequence[Place], *, rows: int | None = None) -> Tensor:
        """Read a weight, or this rank's part of it. Raises `ModelError`.

        ``rows`` is the unpadded size of the vocabulary, for weights with a row per token; padding is read as zeros.
        """
        return torch.cat([self._read(place, rows) for place in parts]) if len(parts) > 1 else self._read(parts[0], rows)

    def dtype(self, place: Place) -> torch.dtype:
        """Return the dtype of the tensor in which a place is. Raises `ModelError` if it is missing."""
        return self._entry(place).properties.dtype

    def _entry(self, place: Place) -> TensorStorageMetadata:
        entry = self._files.tensors.get(place.key)
        if entry is None:
            raise ModelError(f"{self._error_prefix} lacks {place.key}")
        return entry

    def _read(self, place: Place, rows: int | None) -> Tensor:
        entry = self._entry(place)
        size, wanted = list(entry.size), list(place.size)
        if rows is None and size == wanted:
            return self._files.read(place.key, place.start, place.shape).reshape(place.data.shape)
        if rows is None or size[1:] != wanted[1:]:
            raise ModelError(f"{self._error_prefix} has different shapes: {place.key} {size} instead of {wanted}")
        if size[0] < rows:
            raise ModelError(
                f"{self._error_prefix} has {size[0]} vocabulary rows in {place.key}, at least {rows} are required"
            )
        stored = max(0, min(rows - place.start[0], place.shape[0]))
        if stored == place.shape[0]:
            return self._files.read(place.key, place.start, place.shape)
        result = torch.zeros(place.shape, dtype=entry.properties.dtype)
        if stored:
            result[:stored] = self._files.read(place.key, place.start, (stored, *place.shape[1:]))
        return result
