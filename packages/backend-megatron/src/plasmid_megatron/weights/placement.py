"""Where Megatron's distributed format (`torch_dist`) keeps the weights of a module, and reading them from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from plasmid.errors import ModelError
from plasmid_convert.distributed_files import DistributedFiles
from torch import Tensor, nn

OF_MODEL = ("decoder.", "embedding.", "output_layer.", "mtp.", "score.")
"""What the names of a language model's own weights begin with; optimizers and critics have others."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Their rows are filled up to what the ranks of tensor parallelism can share."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A region of a tensor in the checkpoint, and the part of a weight that it has."""

    key: str
    size: tuple[int, ...]
    """Of the whole tensor: layers and experts are stacked."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: Tensor
    """The part of the weight; it may be without memory."""


def sharding() -> dict[str, Any]:
    """How Megatron shall name and stack weights; the groups of ranks exist."""
    return {"singleton_local_shards": False, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def places(chunk: nn.Module) -> dict[str, list[Place]]:
    """By the module's own names of its weights. Several places of one weight lie behind each other in its rows."""
    state: dict[str, Any] = chunk.sharded_state_dict(prefix="", metadata=sharding())  # type: ignore[operator]
    return {name: [_place(one) for one in _built(entry)] for name, entry in state.items() if _is_tensor(entry)}


def objects(chunk: nn.Module) -> Iterator[ShardedObject]:
    """What Megatron keeps besides tensors."""
    for entry in chunk.sharded_state_dict(prefix="", metadata=sharding()).values():  # type: ignore[operator]
        if isinstance(entry, ShardedObject):
            yield entry


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, ShardedTensor | ShardedTensorFactory)


def _built(entry: Any) -> list[ShardedTensor]:
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
    """A folder whose weights are read region by region."""

    def __init__(self, path: Path, beginning: str) -> None:
        """``beginning`` is that of every error: it ends with what lacks something or has it. Raises `ModelError`."""
        self._files, self._beginning = DistributedFiles(path), beginning
        self.names = {name for name in self._files.tensors if name.startswith(OF_MODEL)}
        """Of all weights of the language model."""

    def has(self, parts: Sequence[Place]) -> bool:
        """True if all these parts have a name in the folder."""
        return all(place.key in self._files.tensors for place in parts)

    def read(self, parts: Sequence[Place], *, rows: int | None = None) -> Tensor:
        """A weight, or this rank's part of it. Raises `ModelError`.

        ``rows`` is for tensors over the vocabulary: how many it has without what fills it up, which is read as zeros.
        """
        return torch.cat([self._read(place, rows) for place in parts]) if len(parts) > 1 else self._read(parts[0], rows)

    def _read(self, place: Place, rows: int | None) -> Tensor:
        entry = self._files.tensors.get(place.key)
        if entry is None:
            raise ModelError(f"{self._beginning} lacks {place.key}")
        size, wanted = list(entry.size), list(place.size)
        if rows is None and size == wanted:
            return self._files.read(place.key, place.start, place.shape).reshape(place.data.shape)
        if rows is None or size[1:] != wanted[1:]:
            raise ModelError(f"{self._beginning} has other shapes: {place.key} {size} instead of {wanted}")
        if size[0] < rows:
            raise ModelError(
                f"{self._beginning} has {size[0]} rows of the vocabulary in {place.key}, and {rows} are wanted"
            )
        there = max(0, min(rows - place.start[0], place.shape[0]))
        result = torch.zeros(place.shape, dtype=entry.properties.dtype)
        if there:
            result[:there] = self._files.read(place.key, place.start, (there, *place.shape[1:]))
        return result
