"""Packing of samples in Megatron's layout for packed sequences ("thd"). T tokens of a replica.

With C context-parallel ranks every sequence is split into 2C equal pieces, of which rank r has r and 2C - 1 - r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from plasmid_training.batches.collate import Microbatch
from plasmid_training.batches.packed_attention import Block, dense_width
from plasmid_training.batches.prefix_attention import prefix_layout
from plasmid_training.head.kept_tokens import KeptTokens
from torch import Tensor
from torch.nn.functional import pad


@dataclass
class Sequences(PackedSeqParams):  # type: ignore[misc]
    """Boundaries of packed sequences, including the padding at the end of each."""

    cu_seqlens: Any = None
    """[n + 1] int32 on the device; Megatron's own are on the CPU, where it reads them one by one.

    TransformerEngine reads Megatron's, which are then on the device, too.
    """
    order: Any = None
    """[T] int64: position in the packed row of the tokens of all context-parallel ranks in order; None for one rank."""
    width: Any = None
    """Length of every sequence if attention is computed over a dense block; None if sequences are packed."""
    block: Any = None
    """`Block` of the packed sequences, where attention has no packed kernels: on a CPU, in fp32, if linear."""
    shared: Any = None
    """`PrefixLayout` if samples share prefixes; then there are no boundaries of sequences."""
    num_tokens: Any = None
    """Number of tokens of `shared`; the rest of the row is padding."""
    rotary: Any = None
    """[2, T / C, 1, r] cosine and sine of the angles by which `PackedAttention` rotates queries and keys."""
    local_rotary: Any = None
    """The same for layers with a sliding window, if their angles differ."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """One rank's part of a microbatch."""

    batch: Microbatch
    input_ids: Tensor
    """[1, T / C] int64"""
    position_ids: Tensor
    """[1, T / C] int64"""
    source: Tensor
    """[p] int64: indices of this rank's tokens that predict a token."""
    places: Tensor
    """[p] int64: index of the predicted token among the microbatch's P."""
    kept: KeptTokens | None
    """Kept sets of these predicted tokens."""
    experts: Tensor | None
    """[n, layers, choices] experts that the engine chose for the tokens that this rank routes, -1 if unknown."""
    sequences: Sequences


def pack(
    batch: Microbatch,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    divisor: int = 1,
    bounds_on_device: bool = False,
    dense: bool = False,
    linear: bool = False,
) -> Packed:
    """Pack a collated microbatch, which is on the CPU, and move this rank's part to the device.

    ``dtype`` is that of the computation. Each rank's number of tokens is a multiple of ``divisor``.
    ``bounds_on_device`` also moves the sequence boundaries. With ``dense``, long samples of similar length are padded
    to one (`dense_width`), for dense attention. Layers with ``linear`` attention need sequences as a block.
    """
    if batch.prefix_lengths:
        return _pack_shared(batch, device, dtype, divisor)
    cp_size, cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    count, width = len(batch.lengths), dense_width(batch.lengths, device) if dense and cp_size == 1 else None
    if width is not None and count * width % divisor:
        width = None
    lengths = _pad_lengths(list(batch.lengths), cp_size, divisor) if width is None else [width] * count
    needs_block = linear or device.type != "cuda" or dtype == torch.float32
    starts = torch.tensor([0, *lengths]).cumsum(0)
    place = torch.cat([start + torch.arange(n) for start, n in zip(starts[:-1], batch.lengths, strict=True)])
    total = int(starts[-1])
    ids, positions = torch.zeros(total, dtype=torch.int64), torch.cat([torch.arange(n) for n in lengths])
    ids[place] = batch.token_ids
    sources = place[batch.source]  # [P] positions in the row before it is split
    order = torch.cat([_rank_positions(starts, rank, cp_size) for rank in range(cp_size)])
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
        experts=_experts(batch, place, own, total, divisor, device),
        sequences=Sequences(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            cu_seqlens=on_device,
            order=order.to(device) if cp_size > 1 else None,
            width=width,
            block=Block.of(lengths, device) if needs_block and width is None else None,
        ),
    )


def _pack_shared(batch: Microbatch, device: torch.device, dtype: torch.dtype, divisor: int) -> Packed:
    """Pack samples that share prefixes, which the row contains once; without context parallelism."""
    count = len(batch.token_ids)
    padding = (0, -count % divisor)
    spans = zip(batch.prefix_lengths, batch.lengths, strict=True)
    positions = torch.cat([torch.arange(start, end) for start, end in spans])
    longest, on_device = max(batch.lengths), batch.to(device)
    return Packed(
        batch=on_device,
        input_ids=pad(on_device.token_ids, padding)[None],
        position_ids=pad(positions, padding)[None].to(device),
        source=on_device.source,
        places=torch.arange(batch.num_predicted, device=device),
        kept=on_device.kept,
        experts=_experts(
            batch, torch.arange(count), torch.arange(count + padding[1]), count + padding[1], divisor, device
        ),
        sequences=Sequences(
            qkv_format="thd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            shared=prefix_layout(batch, device, dtype),
            num_tokens=count,
        ),
    )


def _experts(
    batch: Microbatch, place: Tensor, own: Tensor, total: int, divisor: int, device: torch.device
) -> Tensor | None:
    """Return the experts of this rank's tokens; with ``divisor`` ranks that split activations, of its part of them."""
    if batch.experts is None:
        return None
    whole = batch.experts.new_full((total, *batch.experts.shape[1:]), -1)
    whole[place] = batch.experts
    part = whole[own].chunk(divisor)[mpu.get_tensor_model_parallel_rank() if divisor > 1 else 0]
    return part.to(device)


def _pad_lengths(lengths: list[int], cp_size: int, divisor: int) -> list[int]:
    """Pad lengths so that they can be split; pad the last so that each rank's share is a multiple of ``divisor``."""
    unit = 2 * cp_size if cp_size > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    padded[-1] += -sum(padded) % math.lcm(unit, cp_size * divisor)
    return padded


def _rank_positions(starts: Tensor, rank: int, cp_size: int) -> Tensor:
    """Return the positions in the packed row of a context-parallel rank's tokens, in its order."""
    if cp_size == 1:
        return torch.arange(int(starts[-1]))
    parts = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        piece = (end - start) // (2 * cp_size)
        for number in (rank, 2 * cp_size - 1 - rank):
            parts.append(torch.arange(start + number * piece, start + (number + 1) * piece))
    return torch.cat(parts)
