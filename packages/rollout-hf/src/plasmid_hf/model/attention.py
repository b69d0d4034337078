"""Attention over the slot cache, registered with transformers under its own name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from plasmid_models.kernels.attention_sinks import attention_with_sinks
from plasmid_models.kernels.invariant import Spans, attention
from plasmid_models.kernels.invariant_modules import call_without_checks, check_attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .cache import SlotCache

NAME = "plasmid_slots"
UNSUPPORTED = ("softcap", "position_bias")
"""Arguments with which some model families modify attention. They are refused, not ignored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerOptions:
    """How one layer differs from plain causal attention."""

    scaling: float
    window: int | None = None
    """A token attends to itself and the ``window - 1`` tokens before it; None to all."""
    sinks: Tensor | None = None
    """[heads] logits that each head adds to the denominator of its softmax."""


class Plan(Protocol):
    """The attention computation of one forward pass."""

    @property
    def spans(self) -> Spans | None:
        """Spans for batch-invariant attention; None for PyTorch's."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        # prompts of one length may come as a batch
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
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
            parts.append(_attend_prompts(q, k, v, options).transpose(1, 2).flatten(0, 1))
        if self.spans is not None:
            return attention(query[0].transpose(0, 1), key, value, self.spans, scale=options.scaling)[None]
        return torch.cat(parts)[None]


def _attend_prompts(query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
    """Compute causal attention [n, heads, length, size] of n prompts of one length."""
    length, window = query.shape[2], options.window
    if options.sinks is None and (window is None or window >= length):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scaling)
    positions = torch.arange(length, device=query.device)
    distance = positions[:, None] - positions
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if options.sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=options.scaling)
    return attention_with_sinks(query, key, value, options.sinks, mask=mask, scale=options.scaling)


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
    windows: dict[int, Tensor] = field(default_factory=dict)
    """Masks of layers with a sliding window, by its size."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        n, length = len(self.rows), self.mask.shape[-1]
        keys[self.rows, :, self.positions] = key[:, :, 0]
        values[self.rows, :, self.positions] = value[:, :, 0]
        if self.spans is not None:
            return attention(query[:, :, 0], keys, values, self.spans, scale=options.scaling)[:, None]
        # query heads that share a key head become queries of that head, so the cache is not repeated
        q = query.reshape(n, keys.shape[1], -1, query.shape[3])
        q, k, v = (q, keys[:n, :, :length], values[:n, :, :length])
        if options.sinks is None:
            mask = self._mask_of(options.window).expand(-1, -1, q.shape[2], -1)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scaling)
        else:
            mask, query = self._mask_of(options.window), query.reshape(n, -1, 1, query.shape[3])
            out = attention_with_sinks(query, k, v, options.sinks, mask=mask, scale=options.scaling)
        return out.reshape(n, 1, -1, value.shape[3])

    def _mask_of(self, window: int | None) -> Tensor:
        if window is None or window >= self.mask.shape[-1]:
            return self.mask
        if window not in self.windows:
            first = self.positions[:, None, None, None] - window
            outside = torch.arange(self.mask.shape[-1], device=self.mask.device) <= first
            self.windows[window] = self.mask.masked_fill(outside, float("-inf"))
        return self.windows[window]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Entry point for transformers. Raises `NotImplementedError` for attention that is computed in another way."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    plan: Plan = kwargs["plan"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    if plan.spans is not None:
        check_attention(sliding_window, s_aux)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = LayerOptions(scaling=scaling, window=sliding_window, sinks=s_aux)
    return call_without_checks(plan.attend, layer, query, key, value, options), None


AttentionInterface.register(NAME, attend)
