"""Attention over the slot cache, registered with transformers under its own name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from plasmid_models.kernels.invariant import Spans, attention
from plasmid_models.kernels.invariant_modules import without_checks
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .cache import SlotCache

NAME = "plasmid_slots"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments with which some model families modify attention. They are refused, not ignored."""


class Plan(Protocol):
    """The attention computation of one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store keys and values and attend: [batch, heads, tokens, size] each to [batch, tokens, heads, size of
        values]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompts:
    """Distinct prompts of one length, adjacent in the packed tokens."""

    start: int
    length: int
    slots: tuple[Tensor, ...]
    """Cache slots of each prompt's keys and values; several if several requests share the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefill:
    """A forward pass over whole prompts, packed into one row."""

    cache: SlotCache
    prompts: Sequence[Prompts]
    spans: Spans | None = None
    """Spans of the distinct prompts, for batch-invariant attention; None for PyTorch's."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        parts = []
        for group in self.prompts:
            span = slice(group.start, group.start + group.length * len(group.slots))
            q, k, v = (_rows(tensor[0, :, span], len(group.slots)) for tensor in (query, key, value))
            for i, slots in enumerate(group.slots):
                keys[slots, :, : group.length] = k[i]
                values[slots, :, : group.length] = v[i]
            if self.spans is not None:
                continue
            repeats = q.shape[1] // k.shape[1]
            k, v = (tensor.repeat_interleave(repeats, 1) for tensor in (k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        if self.spans is not None:
            return attention(query[0].transpose(0, 1), key, value, self.spans, scale=scaling)[None]
        return torch.cat(parts)[None]


def _rows(packed: Tensor, count: int) -> Tensor:
    """Reshape [heads, count * length, size] to [count, heads, length, size]."""
    heads, tokens, size = packed.shape
    return packed.reshape(heads, count, tokens // count, size).transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decode:
    """A forward pass over one token of each of n rows, which occupy slots ``0:n``."""

    cache: SlotCache
    rows: Tensor
    """[n] 0, 1, ..., n - 1"""
    positions: Tensor
    """[n] position of each token in its row."""
    mask: Tensor
    """[n, 1, 1, L] 0 up to and including each row's position, minus infinity after it; same dtype as the queries."""
    spans: Spans | None = None
    """Spans of the rows, for batch-invariant attention; None for PyTorch's."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        n, length = len(self.rows), self.mask.shape[-1]
        keys[self.rows, :, self.positions] = key[:, :, 0]
        values[self.rows, :, self.positions] = value[:, :, 0]
        if self.spans is not None:
            return attention(query[:, :, 0], keys, values, self.spans, scale=scaling)[:, None]
        # query heads that share a key head become queries of that head, so the cache is not repeated
        q = query.reshape(n, keys.shape[1], -1, query.shape[3])
        mask = self.mask.expand(-1, -1, q.shape[2], -1)
        out = scaled_dot_product_attention(
            q, keys[:n, :, :length], values[:n, :, :length], attn_mask=mask, scale=scaling
        )
        return out.reshape(n, 1, -1, value.shape[3])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Entry point for transformers. Raises `NotImplementedError` for anything but plain causal attention."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    plan: Plan = kwargs["plan"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return without_checks(plan.attend, layer, query, key, value, scale), None


AttentionInterface.register(NAME, attend)
