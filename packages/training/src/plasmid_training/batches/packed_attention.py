"""Causal attention within samples that lie one after another. t tokens, h query heads, g key heads, d head size."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

REPEATS_KEYS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether this release of torch shares key heads among query heads itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Where packed tokens lie in a dense block of B samples, padded on the right to the longest, W."""

    index: Tensor
    """[B, W] int64: the packed token; for padding the sample's first, which no real token ever attends to."""
    inverse: Tensor
    """[t] int64: the place in the flattened block of each packed token."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Block:
        """The block of samples of these lengths."""
        sizes = torch.tensor(list(lengths))
        starts, columns = sizes.cumsum(0) - sizes, torch.arange(int(sizes.max()))
        filled = columns[None] < sizes[:, None]
        index = torch.where(filled, starts[:, None] + columns, starts[:, None])
        return cls(index.to(device), filled.flatten().nonzero()[:, 0].to(device))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    block: Block | None = None,
) -> Tensor:
    """[t, h, e] of query [t, h, d], key [t, g, d], value [t, g, e]; samples begin and end at ``cu_seqlens`` [n + 1].

    On a GPU in half precision by torch's packed FlashAttention kernels; else by dense attention over a padded
    ``block``, which is derived from ``cu_seqlens`` if it is not given. With a ``window`` a token attends to itself and
    the ``window - 1`` tokens before it. ``scale`` is 1 / sqrt(d) by default.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, cu_seqlens, longest, scale=scale, window=window)
    if block is None:
        block = Block.of([end - start for start, end in pairwise(cu_seqlens.tolist())], query.device)
    query, key, value = (_unpack(x, block) for x in (query, key, value))
    out = dense_attention(query, key, value, scale=scale, window=window).transpose(1, 2).flatten(0, 1)
    result: Tensor = _Pack.apply(out, block.inverse)  # type: ignore[no-untyped-call]
    return result


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """[B, h, W, e] of query [B, h, W, d], key [B, g, W, d], value [B, g, W, e]: causal, whatever the padding holds."""
    width = query.shape[2]
    # by a branch: torch.compile takes the sizes for symbols, and a symbolic argument would break the graph
    options: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    if window is None or window >= width:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, **options)
    distance = torch.arange(width, device=query.device)[:, None] - torch.arange(width, device=query.device)
    mask = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, **options)


def _unpack(x: Tensor, block: Block) -> Tensor:
    """[B, h, W, d] of packed [t, h, d]."""
    padded: Tensor = _Unpack.apply(x, block.index, block.inverse)  # type: ignore[no-untyped-call]
    return padded.transpose(1, 2)


class _Unpack(torch.autograd.Function):
    """Packed tokens to a padded block; the gradient takes them back, as that of padding is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].flatten(0, 1)[inverse], None, None


class _Pack(torch.autograd.Function):
    """The way back. Indexing's own gradient would add up, one by one, what never meets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.size = len(x)
        return x[inverse]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        whole = grads[0].new_zeros(ctx.size, *grads[0].shape[1:])
        return whole.index_copy(0, inverse, grads[0]), None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    size, widest = value.shape[-1], max(query.shape[-1], value.shape[-1])
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if query.shape[-1] != size:  # latent attention has unequal sizes
        query, key, value = (pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    before = -1 if window is None else window - 1
    options: dict[str, Any] = {"scale": scale, "window_size": (before, 0)}
    if query.shape[1] != key.shape[1]:
        if REPEATS_KEYS:
            options["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    out = varlen_attn(
        query.contiguous(), key.contiguous(), value.contiguous(), cu_seqlens, cu_seqlens, longest, longest, **options
    )
    assert isinstance(out, Tensor), "a second result must be asked for"
    return out if widest == size else out[..., :size]
