"""Batch-invariant operations: the result of a row has the same bits regardless of the other rows of the batch.

PyTorch's kernels choose their tiles, splits and order of sums by the number of rows, so a token's hidden state differs
in its last bits between a trainer's packed row and an engine's batch. The operations in this module sum in a fixed
order (He et al. 2025, Defeating nondeterminism in LLM inference). t tokens, h query heads, g key heads, d and e sizes
of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 16
"""Number of rows per matrix product on the CPU, padded with zeros: BLAS libraries choose kernels by this number."""
BLOCK = 64
"""Number of keys per block of the online softmax on the CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Positions of n sequences in packed queries [t, h, d] and in keys [slots, g, tokens, d]."""

    table: Tensor
    """[n, 5] int64: first query, number of queries, slot, first key, number of keys. Queries belong to the
    last tokens of a sequence; each attends to the keys up to its own."""
    longest: int
    """Maximum number of queries."""

    @classmethod
    def packed(cls, lengths: Sequence[int], device: torch.device) -> Spans:
        """Return the spans of whole sequences, whose keys are packed like their queries, in slot 0."""
        sizes = torch.tensor(list(lengths))
        starts = sizes.cumsum(0) - sizes
        table = torch.stack([starts, sizes, torch.zeros_like(sizes), starts, sizes], dim=1)
        return cls(table.to(device), max(lengths))

    @classmethod
    def last_tokens(cls, lengths: Tensor) -> Spans:
        """Return the spans of one query in each slot; ``lengths`` [n] are numbers of keys, on the device."""
        rows, ones, zeros = torch.arange(len(lengths)), torch.ones_like(lengths), torch.zeros_like(lengths)
        rows = rows.to(lengths.device)
        return cls(torch.stack([rows, ones, rows, zeros, lengths], dim=1), 1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return [n, N] ``x @ weight.T + bias`` of x [n, K] and weight [N, K], summed in fp32; not differentiable."""
    if x.is_cuda:
        from .invariant_triton import matmul

        return matmul(x, weight, bias)
    high = torch.promote_types(x.dtype, torch.float32)
    right = weight.to(high).T
    tiles = pad(x.to(high), (0, 0, 0, -len(x) % TILE)).split(TILE)  # type: ignore[no-untyped-call]
    out = torch.cat([tile @ right for tile in tiles])[: len(x)]
    return (out if bias is None else out + bias.to(high)).to(x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grads[0].flatten(0, -2)
        return (
            (grad @ weight).view_as(x) if needs_x else None,
            grad.T @ x.flatten(0, -2) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of x [..., K]."""
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _RowMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        if x.is_cuda:
            from .invariant_triton import row_mean

            return row_mean(x)
        return x.mean(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad: Tensor = grads[0] / ctx.shape[-1]
        return grad[..., None].expand(ctx.shape)


def row_mean(x: Tensor) -> Tensor:
    """Return the mean [...] of each row of x [..., N]."""
    mean: Tensor = _RowMean.apply(x)  # type: ignore[no-untyped-call]
    return mean


def attention(query: Tensor, keys: Tensor, values: Tensor, spans: Spans, *, scale: float) -> Tensor:
    """Return causal attention [t, h, e] of query [t, h, d], keys [slots, g, tokens, d] and values; not differentiable.

    Sums run over the keys of a sequence in blocks of a fixed size, from the first key on, in prefill and in decoding.
    """
    if query.is_cuda:
        from .invariant_triton import attention

        return attention(query, keys, values, spans.table, spans.longest, scale)
    out = query.new_empty(*query.shape[:2], values.shape[3])
    for start, length, slot, first, known in spans.table.tolist():
        span, of = slice(start, start + length), slice(first, first + known)
        out[span] = _sequence_attention(query[span], keys[slot, :, of], values[slot, :, of], scale)
    return out


def _sequence_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return [l, h, e] of query [l, h, d] and the L keys and values [g, L, d] of one sequence."""
    (length, heads, _), (groups, known, _) = query.shape, keys.shape
    high = torch.promote_types(query.dtype, torch.float32)
    q = query.to(high).reshape(length, groups, -1, query.shape[2]).transpose(0, 1).flatten(1, 2)  # [g, l * h / g, d]
    positions = torch.arange(known - length, known).repeat_interleave(heads // groups)
    missing = -q.shape[1] % TILE
    q = pad(q, (0, 0, 0, missing)).view(groups, -1, TILE, query.shape[2])
    positions = pad(positions, (0, missing)).view(1, -1, TILE, 1)
    keys, values = (pad(x.to(high), (0, 0, 0, -known % BLOCK)) for x in (keys, values))
    top = q.new_full((*q.shape[:3], 1), torch.finfo(high).min)
    total, out = torch.zeros_like(top), q.new_zeros(*q.shape[:3], values.shape[2])
    for start in range(0, known, BLOCK):
        k, v = (x[:, None, start : start + BLOCK] for x in (keys, values))
        scores = _tile_products(q, k.transpose(2, 3)) * scale
        scores.masked_fill_(torch.arange(start, start + BLOCK) > positions, -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - higher).exp(), (top - higher).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + _tile_products(weights, v)
        top = higher
    result = (out / total).flatten(1, 2)[:, : q.shape[1] * TILE - missing]
    return result.reshape(groups, length, -1, values.shape[2]).transpose(0, 1).flatten(1, 2).to(query.dtype)


def _tile_products(tiles: Tensor, right: Tensor) -> Tensor:
    """Return [g, m, TILE, w] products of m tiles [TILE, k] per key head with its matrix [g, 1, k, w]."""
    groups, count = tiles.shape[:2]
    return torch.bmm(tiles.flatten(0, 1), right.expand(-1, count, -1, -1).flatten(0, 1)).view(groups, count, TILE, -1)
