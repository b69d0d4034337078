"""Whole tensors out of the shards of all ranks, many to a collective: one call for each would cost too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .folder_layout import FolderLayout
from .shards import local

GATHERED_BYTES = 64 << 20
"""Of whole tensors that are gathered at once; a larger one travels alone."""


@dataclass(slots=True, eq=False)
class Sharded:
    """This rank's rows of one tensor."""

    name: str
    rows: Tensor
    whole: DTensor
    dtype: torch.dtype
    """That it is to have."""
    padded: int
    """Elements of the largest shard of any rank."""

    def fits(self, other: Sharded) -> bool:
        """Whether one cast and one collective can take both."""
        return self.dtype == other.dtype and self.rows.dtype == other.rows.dtype


def whole_tensors(
    named: Mapping[str, Tensor], layout: FolderLayout, *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in the folder, cast to ``dtype`` if it is of floats. All ranks iterate together."""
    for kept, group in layout.by_dtype(named, dtype):
        for name, tensor in gathered(group, dtype=kept):
            whole = tensor.to(device)
            for part in layout.parts(name):
                yield part.name, part.of(whole)


def gathered(named: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor whole, in order, where its shards lie; floats are cast to ``dtype`` first, so that less is sent.

    All ranks iterate together. Shards are rows (`Shard(0)`), as FSDP2 makes them.
    """
    pending: list[Sharded] = []
    size, mesh, ranks = 0, None, 1
    for name, tensor in named.items():
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        if not isinstance(tensor, DTensor):
            yield from _together(pending)
            pending, size = [], 0
            yield name, tensor.detach().to(kept)
            continue
        if tensor.device_mesh is not mesh:  # asking it for its size takes longer than the copy of a small tensor
            mesh = tensor.device_mesh
            ranks = _ranks(tensor)
        with torch.no_grad():
            piece = Sharded(name, local(tensor).detach(), tensor, kept, _padded(tensor.shape, ranks))
        num_bytes = piece.padded * ranks * kept.itemsize
        if pending and (size + num_bytes > GATHERED_BYTES or not piece.fits(pending[0])):
            yield from _together(pending)
            pending, size = [], 0
        pending.append(piece)
        size += num_bytes
    yield from _together(pending)


def _together(pieces: list[Sharded]) -> Iterator[tuple[str, Tensor]]:
    """One cast and one collective for all pieces: a GPU copies a small tensor faster than a launch takes."""
    if not pieces:
        return
    yield from _cast(pieces) if _ranks(pieces[0].whole) == 1 else _gather(pieces)


def _cast(pieces: list[Sharded]) -> Iterator[tuple[str, Tensor]]:
    """Of one rank, which has everything."""
    first = pieces[0]
    names, rows = [piece.name for piece in pieces], [piece.rows for piece in pieces]
    if first.rows.dtype == first.dtype:
        yield from zip(names, rows, strict=True)
        return
    lengths = [piece.padded for piece in pieces]
    own = torch.empty(sum(lengths), dtype=first.dtype, device=first.rows.device)
    whole = [place.view(row.shape) for place, row in zip(own.split_with_sizes(lengths), rows, strict=True)]
    torch._foreach_copy_(whole, rows)
    yield from zip(names, whole, strict=True)


def _gather(pieces: list[Sharded]) -> Iterator[tuple[str, Tensor]]:
    first = pieces[0]
    mesh, ranks = first.whole.device_mesh, _ranks(first.whole)
    lengths = [piece.padded for piece in pieces]
    own = torch.zeros(sum(lengths), dtype=first.dtype, device=first.rows.device)
    rows = [piece.rows.reshape(-1) for piece in pieces]
    places = zip(own.split_with_sizes(lengths), rows, strict=True)
    torch._foreach_copy_([place[: row.numel()] for place, row in places], rows)
    every = torch.empty(ranks * own.numel(), dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(every, own, group=mesh.get_group())
    for piece, shards in zip(pieces, every.view(ranks, -1).split_with_sizes(lengths, 1), strict=True):
        yield piece.name, shards.reshape(-1)[: piece.whole.numel()].view(piece.whole.shape)


def _padded(shape: torch.Size, ranks: int) -> int:
    return -(-shape[0] // ranks) * (shape.numel() // shape[0]) if shape[0] else 0


def _ranks(tensor: DTensor) -> int:
    """That hold a part of it."""
    return tensor.device_mesh.shape[0]
