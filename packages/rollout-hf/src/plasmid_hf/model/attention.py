"""Attention over the slot cache, put under its own name into the registry that transformers has for this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .cache import SlotCache

NAME = "plasmid_slots"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which some model families change attention; this one must not ignore them."""


class Plan(Protocol):
    """What one forward pass does in every layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Take keys and values up; [batch, tokens, heads, size of values] from [batch, heads, tokens, size] each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompts:
    """Some distinct prompts of one length, next to each other in the stream of tokens."""

    start: int
    length: int
    slots: tuple[Tensor, ...]
    """For each of them the slots that its keys and values go to: several where several requests share a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefill:
    """A forward pass over whole prompts, packed one after another into one row."""

    cache: SlotCache
    prompts: Sequence[Prompts]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        parts = []
        for group in self.prompts:
            span = slice(group.start, group.start + group.length * len(group.slots))
            q, k, v = (_rows(tensor[0, :, span], len(group.slots)) for tensor in (query, key, value))
            for i, slots in enumerate(group.slots):
                keys[slots, :, : group.length] = k[i]
                values[slots, :, : group.length] = v[i]
            repeats = q.shape[1] // k.shape[1]
            k, v = (tensor.repeat_interleave(repeats, 1) for tensor in (k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts)[None]


def _rows(packed: Tensor, count: int) -> Tensor:
    """[count, heads, length, size] of [heads, count * length, size]."""
    heads, tokens, size = packed.shape
    return packed.reshape(heads, count, tokens // count, size).transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decode:
    """A forward pass over one token of each of n rows, which are in slots ``0:n``."""

    cache: SlotCache
    rows: Tensor
    """[n] 0, 1, ..., n - 1"""
    positions: Tensor
    """[n] where in its row each token goes."""
    mask: Tensor
    """[n, 1, 1, L] 0 up to and at each row's position and minus infinity behind it, in the type of the queries."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        n, length = len(self.rows), self.mask.shape[-1]
        keys[self.rows, :, self.positions] = key[:, :, 0]
        values[self.rows, :, self.positions] = value[:, :, 0]
        # query heads that share a key head become queries of that head: nothing of the cache is repeated
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
    """Entry point for transformers. Raises `NotImplementedError` for attention that needs more than causality."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    plan: Plan = kwargs["plan"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    return plan.attend(layer, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


AttentionInterface.register(NAME, attend)
