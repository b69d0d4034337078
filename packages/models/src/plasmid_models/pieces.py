"""Mapping of a folder's tensors to the tensors of a transformers model, which fuses several of them into one.

transformers fuses the experts of a layer when it loads a folder, with a conversion table per family. This module
inverts the table into indices, so that each tensor that is read, sent or written is a view of the model's memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plasmid.errors import ModelError, one_line

from .building import BUILD_LOCK, text_model_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a folder, as a part of a tensor of the model."""

    name: str
    """Name in the folder."""
    index: Index = ()
    """Index into the model's tensor; integers drop their dimension, and slices have start and stop."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of the model's tensor."""
        return tensor[self.index] if self.index else tensor

    def shape(self, whole: Collection[int]) -> tuple[int, ...]:
        """Return the shape in the folder for a model tensor of shape ``whole``."""
        kept = [
            part.stop - part.start if isinstance(part, slice) else None
            for part in self.index + tuple(slice(0, size) for size in tuple(whole)[len(self.index) :])
        ]
        return tuple(size for size in kept if size is not None)

    def within(self, rows: slice) -> tuple[Index, slice] | None:
        """Return the index within ``rows`` of the model's tensor and the piece's rows there; None if disjoint."""
        first, rest = (self.index[0], self.index[1:]) if self.index else (rows, ())
        if isinstance(first, int):
            inside = rows.start <= first < rows.stop
            return ((first - rows.start, *rest), slice(None)) if inside else None
        start, stop = max(first.start, rows.start), min(first.stop, rows.stop)
        if start >= stop:
            return None
        offset = first.start if self.index else 0
        return (slice(start - rows.start, stop - rows.start), *rest), slice(start - offset, stop - offset)


Pieces = Mapping[str, tuple[Piece, ...]]
"""Pieces by the name of the model's tensor; tensors that are not listed are the same in the folder."""


def pieces_of(model: PreTrainedModel) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces into which transformers splits tensors when it saves the model, which may be on meta device.

    Covers stacked and concatenated tensors; tensors with other conversions are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    table = [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]
    back = [transform.reverse_transform() for transform in reversed(table)]
    converters = [transform for transform in back if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in back if not isinstance(transform, WeightConverter)]
    found: dict[str, tuple[Piece, ...]] = {}
    for name, tensor in model.state_dict().items():
        pieces = _split_by_converters(name, tuple(tensor.shape), converters)
        if pieces is None:
            continue
        pieces = tuple(Piece(_rename(piece.name, renamings), piece.index) for piece in pieces)
        if pieces != (Piece(name),):
            found[name] = pieces
    return found


def _split_by_converters(name: str, shape: tuple[int, ...], converters: list[Any]) -> tuple[Piece, ...] | None:
    """Apply the first converter that matches the name; None if it does more than split tensors."""
    for converter in converters:
        new, matched = converter.rename_source_key(name)
        if matched is not None:
            first = converter.target_patterns[0]
            names = [new.replace(first, target, 1) for target in converter.target_patterns]
            return _split_tensor(names, shape, converter.operations)
    return (Piece(name),)


def _split_tensor(names: list[str], shape: tuple[int, ...], operations: list[Any]) -> tuple[Piece, ...] | None:
    from transformers.core_model_loading import Chunk, SplitModulelist

    if any(not isinstance(operation, Chunk | SplitModulelist) for operation in operations):
        return None
    parts = [(names, tuple(slice(0, size) for size in shape))]
    for operation in operations:
        dim = operation.dim % len(shape)
        if isinstance(operation, Chunk):
            parts = [part for whole in parts for part in _chunks(*whole, dim)]
        else:
            parts = [part for whole in parts for part in _unstack(*whole, dim)]
    if any(len(found) != 1 or "*" in found[0] for found, _ in parts):
        return None
    return tuple(Piece(found[0], index) for found, index in parts)


Part = tuple[list[str], Any]
"""Names that a part may be split into, and its index."""


def _chunks(names: list[str], index: tuple[slice, ...], dim: int) -> list[Part]:
    start, stop = index[dim].start, index[dim].stop
    size = math.ceil((stop - start) / len(names))
    cuts = [slice(low, min(low + size, stop)) for low in range(start, stop, size)]
    return [([name], (*index[:dim], cut, *index[dim + 1 :])) for name, cut in zip(names, cuts, strict=True)]


def _unstack(names: list[str], index: tuple[slice, ...], dim: int) -> list[Part]:
    numbers = range(index[dim].start, index[dim].stop)
    return [([name.replace("*", str(i), 1) for name in names], (*index[:dim], i, *index[dim + 1 :])) for i in numbers]


def _rename(name: str, renamings: list[Any]) -> str:
    for renaming in renamings:
        name = renaming.rename_source_key(name)[0]
    return name


def pieces_of_folder(folder: Path, names: Collection[str]) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of a folder whose tensors have these names. Does not run its code. Raises `ModelError`."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = text_model_config(folder, trust_remote_code=False)
        with BUILD_LOCK, torch.device("meta"):
            # a config.json may name an attention kernel on the Hub, which would be downloaded and run
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation="eager", trust_remote_code=False
            )
    except (ValueError, KeyError, ImportError, OSError) as error:
        raise ModelError(f"{folder}: cannot be loaded as a causal language model: {one_line(error)}") from None
    return present_pieces(pieces_of(model), names)


def present_pieces(pieces: Pieces, names: Collection[str]) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces that a folder with these tensor names has; it may also store a tensor fused."""
    return {own: parts for own, parts in pieces.items() if all(piece.name in names for piece in parts)}
