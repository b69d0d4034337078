"""Causal attention of packed samples that share prefixes. t packed tokens, h query heads, g key heads, d head size.

The packed row contains the tokens of a shared prefix once. Keys and values are gathered for every sample; queries are
not copied, so a sample that reuses a prefix has queries for its own tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .collate import Microbatch
from .packed_attention import dense_attention, masked_attention, varlen_attention


@dataclass(frozen=True, slots=True, eq=False)
class TokenGather:
    """Gather that copies each packed token to one or more places; its backward pass sums gradients in a fixed order."""

    index: Tensor
    """[...] int64: index of the packed token at each place."""
    tokens: Tensor
    """[u] int64: tokens that have exactly one place."""
    places: Tensor
    """[u] int64: index of that place in the flattened `index`."""
    shared: Tensor
    """[s] int64: tokens that have several places."""
    copies: Tensor
    """[s, c] int64: these places, padded to c with a repeated one."""
    counted: Tensor
    """[s, c, 1, 1] bool: False for padding in `copies`."""

    @classmethod
    def of(
        cls, index: NDArray[np.int64], filled: NDArray[np.bool_], num_tokens: int, device: torch.device | str
    ) -> TokenGather:
        """Create the gather for ``index``; places that are not ``filled`` are padding and get no gradient."""
        where = np.flatnonzero(filled)
        order = where[np.argsort(index.flat[where], kind="stable")]  # places sorted by token
        counts = np.bincount(index.flat[where], minlength=num_tokens)
        starts = np.cumsum(counts) - counts
        once, often = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        columns = np.arange(counts[often].max(initial=1))
        copies = starts[often, None] + np.minimum(columns, counts[often, None] - 1)
        counted = (columns < counts[often, None])[..., None, None]
        parts = (index, once, order[starts[once]], often, order[copies], counted)
        return cls(*(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts))

    def __call__(self, x: Tensor) -> Tensor:
        """Gather packed [t, g, d] to [..., g, d]."""
        result: Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
            x, self.index, self.tokens, self.places, self.shared, self.copies, self.counted
        )
        return result


class _Gather(torch.autograd.Function):
    """Indexing whose backward pass neither accumulates sequentially (CPU) nor sorts (GPU)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, *back: Tensor) -> Tensor:
        ctx.save_for_backward(*back)
        ctx.size, ctx.dims = len(x), index.ndim
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, places, shared, copies, counted = ctx.saved_tensors
        grad = grads[0].flatten(0, ctx.dims - 1)
        total = grad.new_zeros(ctx.size, *grad.shape[1:])
        total.index_copy_(0, tokens, grad[places])
        total.index_copy_(0, shared, (grad[copies] * counted).sum(1))
        return total, None, None, None, None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class VarlenLayout:
    """Layout for torch's packed kernels, whose causal mask is aligned to the last query and key of each sample."""

    keys: TokenGather
    """[k] keys of all samples, concatenated."""
    cu_seqlens_q: Tensor
    """[B + 1] int32: where each sample's queries begin."""
    cu_seqlens_k: Tensor
    """[B + 1] int32: where each sample's keys begin."""
    max_q: int
    max_k: int

    @classmethod
    def of(cls, batch: Microbatch, device: torch.device) -> VarlenLayout:
        """The layout of a microbatch whose samples share prefixes."""
        own, keys = _pieces(batch)
        index = np.concatenate(keys)
        return cls(
            TokenGather.of(index, np.ones(len(index), np.bool_), len(batch.token_ids), device),
            _bounds(own).to(device),
            _bounds(keys).to(device),
            max(map(len, own)),
            max(map(len, keys)),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Compute [t, h, e] from query [t, h, d], key [t, g, d], value [t, g, e].

        The options ``scale``, ``window`` and ``sinks`` are those of `packed_attention.attend`.
        """
        key, value = self.keys(key), self.keys(value)
        bounds = (self.cu_seqlens_q, self.cu_seqlens_k)
        return varlen_attention(query, key, value, bounds, (self.max_q, self.max_k), **options)


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayout:
    """Two padded blocks: samples with all their tokens, and samples that reuse a prefix."""

    whole: TokenGather
    """[A, W] queries and keys of samples with all their tokens, padded on the right."""
    queries: TokenGather
    """[C, V] queries of samples that reuse a prefix."""
    keys: TokenGather
    """[C, U] keys of samples that reuse a prefix."""
    offsets: Tensor
    """[C] int64: number of tokens before the first query of each such sample."""
    places: TokenGather
    """[t] index of each packed token among the A * W + C * V queries."""

    @classmethod
    def of(cls, batch: Microbatch, device: torch.device) -> DenseLayout:
        """The layout of a microbatch whose samples share prefixes."""
        own, keys = _pieces(batch)
        total = len(batch.token_ids)
        whole = [piece for piece, n in zip(own, batch.prefix_lengths, strict=True) if not n]
        parts = [i for i, n in enumerate(batch.prefix_lengths) if n]
        blocks = [_block(pieces) for pieces in (whole, [own[i] for i in parts], [keys[i] for i in parts])]
        places = np.empty(total, np.int64)
        begin = 0
        for index, filled in blocks[:2]:
            places[index[filled]] = begin + np.flatnonzero(filled)
            begin += index.size
        first, queries, others = (TokenGather.of(index, filled, total, device) for index, filled in blocks)
        return cls(
            first,
            queries,
            others,
            torch.tensor([batch.prefix_lengths[i] for i in parts], device=device),
            TokenGather.of(places, np.ones(total, np.bool_), begin, device),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Compute [t, h, e] from query [t, h, d], key [t, g, d], value [t, g, e].

        The options ``scale``, ``window`` and ``sinks`` are those of `packed_attention.attend`.
        """
        whole = dense_attention(*(self.whole(x).transpose(1, 2) for x in (query, key, value)), **options)
        q, k, v = self.queries(query).transpose(1, 2), self.keys(key).transpose(1, 2), self.keys(value).transpose(1, 2)
        rows, columns = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
        distance = self.offsets[:, None, None] + rows[:, None] - columns  # [C, V, U]
        parts = masked_attention(q, k, v, distance[:, None], **options)
        return self.places(torch.cat([x.transpose(1, 2).flatten(0, 1) for x in (whole, parts)]))


PrefixLayout = VarlenLayout | DenseLayout


def prefix_layout(batch: Microbatch, device: torch.device, dtype: torch.dtype) -> PrefixLayout:
    """Return the layout of a microbatch whose samples share prefixes, for a model that computes in ``dtype``."""
    has_kernels = device.type == "cuda" and dtype != torch.float32
    return VarlenLayout.of(batch, device) if has_kernels else DenseLayout.of(batch, device)


def _pieces(batch: Microbatch) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Return the packed tokens of each sample: its own, and all that it attends to."""
    own_lengths = np.array(batch.lengths) - np.array(batch.prefix_lengths)
    starts = np.cumsum(own_lengths) - own_lengths
    own = [np.arange(start, start + n) for start, n in zip(starts, own_lengths, strict=True)]
    prefixes = zip(batch.prefix_starts, batch.prefix_lengths, strict=True)
    return own, [np.concatenate([np.arange(s, s + n), piece]) for (s, n), piece in zip(prefixes, own, strict=True)]


def _bounds(pieces: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.tensor([0, *map(len, pieces)]).cumsum(0).int()


def _block(pieces: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the tokens [B, W] of the pieces, each padded with its first token, and a mask that is False on padding."""
    sizes = np.array([len(piece) for piece in pieces])
    filled = np.arange(sizes.max()) < sizes[:, None]
    index = np.repeat(np.array([piece[0] for piece in pieces])[:, None], filled.shape[1], 1)
    index[filled] = np.concatenate(pieces)
    return index, filled
