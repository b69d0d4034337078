"""Causal attention within packed samples.

Shapes: t tokens, h query heads, g key heads, d size of a query or key head, e size of a value head.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from plasmid_models.kernels.attention_sinks import attention_with_sinks
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from .sink_attention import PackedSinkAttention

SUPPORTS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether this torch release supports grouped-query attention in `varlen_attn`."""
MAX_PADDING = 1.1
"""Maximum ratio of padded to real tokens for a dense block of long samples: cuDNN's attention over equal rows of 1,024
to 16,384 tokens takes about half the time of packed attention, but all other layers waste time on the padding."""
MIN_MEAN_LENGTH = 2048
"""Minimum mean length for a dense block on a GPU; chosen between measured lengths, not tuned."""
WIDTH_STEP = 512
"""Widths of dense blocks on a GPU are multiples of this, because cuDNN takes 0.13 s to plan each new shape."""


def dense_width(lengths: Sequence[int], device: torch.device | str) -> int | None:
    """Return the width that all samples of a microbatch are padded to for `dense_attention`; None to pack them."""
    width = max(lengths)
    if torch.device(device).type != "cuda":
        return width if min(lengths) == width else None
    width = -(-width // WIDTH_STEP) * WIDTH_STEP
    is_long = sum(lengths) >= MIN_MEAN_LENGTH * len(lengths)
    return width if is_long and len(lengths) * width <= MAX_PADDING * sum(lengths) else None


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Mapping between packed tokens and a dense block of B samples, padded on the right to the longest, W."""

    index: Tensor
    """[B, W] int64: index of the packed token; for padding, of the sample's first token."""
    inverse: Tensor
    """[t] int64: index of each packed token in the flattened block."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Block:
        """Create the mapping for samples of these lengths."""
        sizes = torch.tensor(list(lengths))
        starts, columns = sizes.cumsum(0) - sizes, torch.arange(int(sizes.max()))
        filled = columns[None] < sizes[:, None]
        index = torch.where(filled, starts[:, None] + columns, starts[:, None])
        return cls(index.to(device), filled.flatten().nonzero()[:, 0].to(device))

    def unpack(self, x: Tensor) -> Tensor:
        """Unpack [t, ...] to [B, W, ...]."""
        padded: Tensor = _Unpack.apply(x, self.index, self.inverse)  # type: ignore[no-untyped-call]
        return padded

    def pack(self, x: Tensor) -> Tensor:
        """Pack [B * W, ...] to [t, ...]."""
        packed: Tensor = _Pack.apply(x, self.inverse)  # type: ignore[no-untyped-call]
        return packed


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    block: Block | None = None,
) -> Tensor:
    """Compute attention [t, h, e] of query [t, h, d], key [t, g, d] and value [t, g, e], packed at ``cu_seqlens``.

    ``cu_seqlens`` [n + 1] are cumulative lengths of the n samples, and ``longest`` is the maximum length.

    Uses torch's packed FlashAttention kernels on a GPU in half precision, otherwise dense attention over a padded
    ``block``, which is derived from ``cu_seqlens`` if it is None. With a ``window``, a token attends to itself and the
    ``window - 1`` tokens before it. ``scale`` is 1 / sqrt(d) by default. ``sinks`` [h] are logits that each head adds
    to the denominator of its softmax.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        bounds, sizes = (cu_seqlens, cu_seqlens), (longest, longest)
        return varlen_attention(query, key, value, bounds, sizes, scale=scale, window=window, sinks=sinks)
    if block is None:
        block = Block.of([end - start for start, end in pairwise(cu_seqlens.tolist())], query.device)
    query, key, value = (block.unpack(x).transpose(1, 2) for x in (query, key, value))
    out = dense_attention(query, key, value, scale=scale, window=window, sinks=sinks)
    return block.pack(out.transpose(1, 2).flatten(0, 1))


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention [B, h, W, e] of query [B, h, W, d], key [B, g, W, d] and value [B, g, W, e]."""
    width = query.shape[2]
    if sinks is None and (window is None or window >= width):
        options = _make_options(query, key)
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, **options)
    distance = torch.arange(width, device=query.device)[:, None] - torch.arange(width, device=query.device)
    return masked_attention(query, key, value, distance, scale=scale, window=window, sinks=sinks)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance: Tensor,
    *,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention; ``distance`` [..., V, U] is each query's position less that of each key."""
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if sinks is not None:
        return attention_with_sinks(query, key, value, sinks, mask=mask, scale=scale)
    options = _make_options(query, key)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, **options)


def _make_options(query: Tensor, key: Tensor) -> dict[str, Any]:
    # no `enable_gqa=h != g`: sizes are symbolic under torch.compile, and a symbolic argument would break the graph
    return {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}


class _Unpack(torch.autograd.Function):
    """Packed tokens to a padded block. The backward pass gathers the tokens' gradients; those of padding are 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].flatten(0, 1)[inverse], None, None


class _Pack(torch.autograd.Function):
    """Padded block to packed tokens. Faster backward pass than plain indexing, which allows for repeated indices."""

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


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Call torch's packed kernels; ``cu_seqlens`` and ``longest`` are those of queries and of keys.

    If a sample has fewer queries than keys, the queries are its last tokens: FlashAttention's causal mask is aligned to
    the bottom right.
    """
    size, widest = value.shape[-1], max(query.shape[-1], value.shape[-1])
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if query.shape[-1] != size:  # in latent attention, query and value heads have different sizes
        query, key, value = (pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    before = -1 if window is None else window - 1
    options: dict[str, Any] = {"scale": scale, "window_size": (before, 0)}
    if query.shape[1] != key.shape[1]:
        if SUPPORTS_GQA:
            options["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    if sinks is None:
        out = varlen_attn(query, key, value, *cu_seqlens, *longest, **options)
    else:
        out = PackedSinkAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, sinks, cu_seqlens, longest, scale, (before, 0)
        )
    assert isinstance(out, Tensor), "a second result must be requested"
    return out if widest == size else out[..., :size]
