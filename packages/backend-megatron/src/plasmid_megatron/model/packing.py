"""Samples one after another without padding, as Megatron lays packed sequences out ("thd"). T tokens of a replica.

With C context-parallel ranks every sequence is cut into 2C equal pieces, of which rank r has pieces r and 2C - 1 - r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from plasmid_training.batches.collate import Microbatch
from plasmid_training.head.kept_tokens import KeptTokens
from torch import Tensor


@dataclass
class Sequences(PackedSeqParams):  # type: ignore[misc]
    """Where sequences begin and end; padding belongs to the last tokens of each."""

    cu_seqlens: Any = None
    """[n + 1] int32 on the device; Megatron's own are on the CPU, where it reads them one by one.

    TransformerEngine takes Megatron's, and then they are on the device, too.
    """
    order: Any = None
    """[T] int64: natural place of each token of all context-parallel ranks, rank after rank; None for one rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """What one rank is given of a microbatch."""

    batch: Microbatch
    input_ids: Tensor
    """[1, T / C] int64"""
    position_ids: Tensor
    """[1, T / C] int64"""
    source: Tensor
    """[p] int64: which of this rank's tokens predict something."""
    places: Tensor
    """[p] int64: which of the microbatch's P predicted tokens that is."""
    kept: KeptTokens | None
    """Kept sets of those tokens."""
    sequences: Sequences


def pack(batch: Microbatch, *, device: torch.device, divisor: int = 1, bounds_on_device: bool = False) -> Packed:
    """Pack a collated microbatch, which is still on the CPU, and move this rank's part to the device.

    Each rank's number of tokens is a multiple of ``divisor``. With ``bounds_on_device`` all tensors are there.
    """
    cp_size, cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    lengths = _padded(list(batch.lengths), cp_size, divisor)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    place = torch.cat([start + torch.arange(n) for start, n in zip(starts[:-1], batch.lengths, strict=True)])
    total = int(starts[-1])
    ids, positions = torch.zeros(total, dtype=torch.int64), torch.cat([torch.arange(n) for n in lengths])
    ids[place] = batch.token_ids
    sources = place[batch.source]  # [P] natural places
    order = torch.cat([_owned(starts, rank, cp_size) for rank in range(cp_size)])
    own = order.view(cp_size, -1)[cp_rank]
    local = torch.full((total,), -1)
    local[own] = torch.arange(len(own))
    here = torch.nonzero(local[sources] >= 0)[:, 0]
    on_device = starts.int().to(device)
    cu_seqlens = on_device if bounds_on_device else starts.int()
    return Packed(
        batch=batch.to(device),
        input_ids=ids[own][None].to(device),
        position_ids=positions[own][None].to(device),
        source=local[sources[here]].to(device),
        places=here.to(device),
        kept=None if batch.kept is None else batch.kept.select(here.numpy()).to(device),
        sequences=Sequences(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            cu_seqlens=on_device,
            order=order.to(device) if cp_size > 1 else None,
        ),
    )


def _padded(lengths: list[int], cp_size: int, divisor: int) -> list[int]:
    """Lengths that can be cut, the last one filled up so that every rank's share is a multiple of ``divisor``."""
    unit = 2 * cp_size if cp_size > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    padded[-1] += -sum(padded) % math.lcm(unit, cp_size * divisor)
    return padded


def _owned(starts: Tensor, rank: int, cp_size: int) -> Tensor:
    """Natural places of the tokens that a context-parallel rank has, in its order."""
    if cp_size == 1:
        return torch.arange(int(starts[-1]))
    parts = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        piece = (end - start) // (2 * cp_size)
        for number in (rank, 2 * cp_size - 1 - rank):
            parts.append(torch.arange(start + number * piece, start + (number + 1) * piece))
    return torch.cat(parts)
