"""Whole tensors out of the shards of all ranks, many to a collective: one call for each would cost too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .weights import local

GATHERED_BYTES = 64 << 20
"""Of whole tensors that are gathered at once; a larger one travels alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """This rank's rows of one tensor."""

    name: str
    rows: Tensor
    whole: DTensor
    dtype: torch.dtype
    """That it is to have."""

    @property
    def padded(self) -> int:
        """Elements of the largest shard of any rank."""
        ranks = _ranks(self.whole)
        count = self.whole.shape[0]
        return -(-count // ranks) * (self.whole.numel() // count) if count else 0

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """What it has, and is to have."""
        return self.rows.dtype, self.dtype


def gathered(named: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor whole, in order, where its shards lie; floats are cast to ``dtype`` first, so that less is sent.

    All ranks iterate together. Shards are rows (`Shard(0)`), as FSDP2 makes them.
    """
    pending: list[Sharded] = []
    size = 0
    for name, tensor in named.items():
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        with torch.no_grad():
            rows = local(tensor).detach()
        if not isinstance(tensor, DTensor) or (_ranks(tensor) == 1 and rows.dtype == kept):
            yield from _together(pending)
            pending, size = [], 0
            yield name, rows.to(kept)
            continue
        piece = Sharded(name, rows, tensor, kept)
        num_bytes = piece.padded * _ranks(tensor) * kept.itemsize
        if pending and (size + num_bytes > GATHERED_BYTES or piece.dtypes != pending[0].dtypes):
            yield from _together(pending)
            pending, size = [], 0
        pending.append(piece)
        size += num_bytes
    yield from _together(pending)


def _together(pieces: list[Sharded]) -> Iterator[tuple[str, Tensor]]:
    """One cast and one collective for all pieces, which have one dtype, and shall have one."""
    if not pieces:
        return
    first = pieces[0]
    mesh, ranks = first.whole.device_mesh, _ranks(first.whole)
    lengths = [piece.padded for piece in pieces]
    own = torch.zeros(sum(lengths), dtype=first.dtype, device=first.rows.device)
    places = own.split_with_sizes(lengths)
    with torch.no_grad():
        torch._foreach_copy_(
            [place[: piece.rows.numel()] for place, piece in zip(places, pieces, strict=True)],
            [piece.rows.reshape(-1) for piece in pieces],
        )
    every = own
    if ranks > 1:
        every = torch.empty(ranks * own.numel(), dtype=own.dtype, device=own.device)
        dist.all_gather_into_tensor(every, own, group=mesh.get_group())
    for piece, shards in zip(pieces, every.view(ranks, -1).split_with_sizes(lengths, 1), strict=True):
        yield piece.name, shards.reshape(-1)[: piece.whole.numel()].view(piece.whole.shape)


def _ranks(tensor: DTensor) -> int:
    """That hold a part of it. (`DeviceMesh.size` takes longer than the copy of a small tensor.)"""
    return tensor.device_mesh.shape[0]
