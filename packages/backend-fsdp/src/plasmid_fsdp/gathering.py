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
    """This rank's rows of one tensor, cast."""

    name: str
    rows: Tensor
    whole: DTensor

    @property
    def padded(self) -> int:
        """Elements of the largest shard of any rank."""
        ranks = _ranks(self.whole)
        count = self.whole.shape[0]
        return -(-count // ranks) * (self.whole.numel() // count) if count else 0


def gathered(named: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor whole, in order, where its shards lie; floats are cast to ``dtype`` first, so that less is sent.

    All ranks iterate together. Shards are rows (`Shard(0)`), as FSDP2 makes them.
    """
    pending: list[Sharded] = []
    size = 0
    for name, tensor in named.items():
        if not isinstance(tensor, DTensor):
            yield from _together(pending)
            pending, size = [], 0
            yield name, _cast(tensor.detach(), dtype)
            continue
        with torch.no_grad():
            rows = _cast(local(tensor), dtype)
        ranks = _ranks(tensor)
        if ranks == 1:
            yield name, rows
            continue
        piece = Sharded(name, rows, tensor)
        num_bytes = piece.padded * ranks * piece.rows.itemsize
        if pending and (size + num_bytes > GATHERED_BYTES or piece.rows.dtype != pending[0].rows.dtype):
            yield from _together(pending)
            pending, size = [], 0
        pending.append(piece)
        size += num_bytes
    yield from _together(pending)


def _together(pieces: list[Sharded]) -> Iterator[tuple[str, Tensor]]:
    """One collective for all pieces, which have one dtype."""
    if not pieces:
        return
    first = pieces[0]
    mesh = first.whole.device_mesh
    total = sum(piece.padded for piece in pieces)
    own = torch.zeros(total, dtype=first.rows.dtype, device=first.rows.device)
    start = 0
    for piece in pieces:
        own[start : start + piece.rows.numel()] = piece.rows.reshape(-1)
        start += piece.padded
    every = torch.empty(mesh.size() * total, dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(every, own, group=mesh.get_group())
    every = every.view(mesh.size(), total)
    start = 0
    for piece in pieces:
        shards = every[:, start : start + piece.padded].reshape(-1)
        start += piece.padded
        yield piece.name, shards[: piece.whole.numel()].view(piece.whole.shape)


def _ranks(tensor: DTensor) -> int:
    """That hold a part of it. (`DeviceMesh.size` takes longer than the copy of a small tensor.)"""
    return tensor.device_mesh.shape[0]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
