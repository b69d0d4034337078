"""Gathering of whole tensors from the shards of all ranks, many per collective to save launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from plasmid_models.sync import Gatherable
from torch import Tensor
from torch.distributed.tensor import DTensor

from .folder_layout import FolderLayout
from .shards import local

EMPTY: Mapping[str, Callable[[Tensor], Tensor]] = {}
GATHERED_BYTES = 64 << 20
"""Maximum bytes of whole tensors gathered at once; a larger tensor is gathered by itself."""


@dataclass(slots=True, eq=False)
class ShardedTensor:
    """This rank's rows of one tensor."""

    name: str
    rows: Tensor
    whole: DTensor
    dtype: torch.dtype
    """Target dtype."""
    padded: int
    """Elements of the largest shard of any rank."""

    def can_join(self, other: ShardedTensor) -> bool:
        """Return True if both can share one cast and one collective."""
        return self.dtype == other.dtype and self.rows.dtype == other.rows.dtype


def whole_tensors(
    named: Mapping[str, Tensor],
    layout: FolderLayout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    changes: Mapping[str, Callable[[Tensor], Tensor]] = EMPTY,
    owners: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights by name in the folder, gathered from all ranks, floats cast to ``dtype``. Collective.

    ``changes`` are functions, by name, that are applied to whole weights before the cast. With ``owners``, see
    `gather_tensors`.
    """
    for own, group in layout.group_by_dtype(named, dtype):
        for name, tensor in gather_tensors(group, dtype=own, uncast=changes, owners=owners):
            whole = tensor.to(device)
            if name in changes:
                whole = changes[name](whole).to(own)
            for part in layout.parts(name):
                yield part.name, part.of(whole)


def gatherables(named: Mapping[str, Tensor], layout: FolderLayout, dtype: torch.dtype) -> list[Gatherable]:
    """Return all weights with their bytes in ``dtype``. Every rank can gather every weight."""
    ranks = tuple(range(dist.get_world_size()))
    return [
        Gatherable(key=name, num_bytes=sum(layout.sizes({name: tensor}, dtype).values()), ranks=ranks)
        for name, tensor in named.items()
    ]


def gather_tensors(
    named: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    uncast: Collection[str] = (),
    owners: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all whole tensors, in order, on the device of the shards; floats are cast to ``dtype`` before gathering.

    Tensors named in ``uncast`` keep their dtype. All ranks iterate together. Shards are rows (`Shard(0)`) over the
    last dimension of the mesh, as in FSDP2. With ``owners`` only the tensors in it are gathered, each on the rank that
    it gives; this rank yields those that it owns.
    """
    pending: list[ShardedTensor] = []
    size, mesh, ranks = 0, None, 1
    self_rank = dist.get_rank() if owners is not None else 0
    for name, tensor in named.items():
        if owners is not None and name not in owners:
            continue
        target = dtype if tensor.is_floating_point() and name not in uncast else tensor.dtype
        if not isinstance(tensor, DTensor):
            yield from _flush(pending, owners)
            pending, size = [], 0
            if owners is None or owners[name] == self_rank:
                yield name, tensor.detach().to(target)
            continue
        if tensor.device_mesh is not mesh:  # getting its size takes longer than copying a small tensor
            mesh = tensor.device_mesh
            ranks = _ranks(tensor)
        with torch.no_grad():
            piece = ShardedTensor(name, local(tensor).detach(), tensor, target, _largest_shard(tensor.shape, ranks))
        num_bytes = piece.padded * (1 if owners is not None else ranks) * target.itemsize
        if pending and (size + num_bytes > GATHERED_BYTES or not piece.can_join(pending[0])):
            yield from _flush(pending, owners)
            pending, size = [], 0
        pending.append(piece)
        size += num_bytes
    yield from _flush(pending, owners)


def _flush(pieces: list[ShardedTensor], owners: Mapping[str, int] | None) -> Iterator[tuple[str, Tensor]]:
    """Use one cast and one collective for all pieces: copying a small tensor is faster than launching the copy."""
    if not pieces:
        return
    if owners is not None:
        yield from _exchange(pieces, owners)
    else:
        yield from _cast(pieces) if _ranks(pieces[0].whole) == 1 else _gather(pieces)


def _cast(pieces: list[ShardedTensor]) -> Iterator[tuple[str, Tensor]]:
    """Cast the tensors of a single rank, which has all rows."""
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


def _exchange(pieces: list[ShardedTensor], owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Gather every piece on its owner in one all-to-all. Copies of the model gather only for owners among them."""
    first = pieces[0]
    mesh, device = first.whole.device_mesh, first.rows.device
    group = mesh.get_group(mesh.ndim - 1)
    members = dist.get_process_group_ranks(group)
    by_owner = {rank: [piece for piece in pieces if owners[piece.name] == rank] for rank in members}
    lengths = {rank: sum(piece.padded for piece in found) for rank, found in by_owner.items()}
    ordered = [piece for found in by_owner.values() for piece in found]
    sent = torch.zeros(sum(lengths.values()), dtype=first.dtype, device=device)
    rows = [piece.rows.reshape(-1) for piece in ordered]
    if ordered:
        places = zip(sent.split_with_sizes([piece.padded for piece in ordered]), rows, strict=True)
        torch._foreach_copy_([place[: row.numel()] for place, row in places], rows)
    own = by_owner[dist.get_rank()]
    length = lengths[dist.get_rank()]
    every = torch.empty(len(members) * length, dtype=first.dtype, device=device)
    dist.all_to_all_single(every, sent, [length] * len(members), list(lengths.values()), group=group)
    parts = every.view(len(members), length).split_with_sizes([piece.padded for piece in own], 1)
    for piece, shards in zip(own, parts, strict=True):
        yield piece.name, shards.reshape(-1)[: piece.whole.numel()].view(piece.whole.shape)


def _gather(pieces: list[ShardedTensor]) -> Iterator[tuple[str, Tensor]]:
    first = pieces[0]
    mesh, ranks = first.whole.device_mesh, _ranks(first.whole)
    lengths = [piece.padded for piece in pieces]
    own = torch.zeros(sum(lengths), dtype=first.dtype, device=first.rows.device)
    rows = [piece.rows.reshape(-1) for piece in pieces]
    places = zip(own.split_with_sizes(lengths), rows, strict=True)
    torch._foreach_copy_([place[: row.numel()] for place, row in places], rows)
    every = torch.empty(ranks * own.numel(), dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(every, own, group=mesh.get_group(mesh.ndim - 1))
    for piece, shards in zip(pieces, every.view(ranks, -1).split_with_sizes(lengths, 1), strict=True):
        yield piece.name, shards.reshape(-1)[: piece.whole.numel()].view(piece.whole.shape)


def _largest_shard(shape: torch.Size, ranks: int) -> int:
    return -(-shape[0] // ranks) * (shape.numel() // shape[0]) if shape[0] else 0


def _ranks(tensor: DTensor) -> int:
    """Return the number of ranks that the tensor is sharded over."""
    return tensor.device_mesh.shape[-1]
