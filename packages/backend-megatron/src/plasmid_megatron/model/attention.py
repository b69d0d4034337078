"""Attention within packed sequences, without TransformerEngine. t tokens, h query heads, g key heads, d head size."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from plasmid_training.batches.packed_attention import attend
from torch import Tensor, nn

from .packing import Sequences


class PackedAttention(nn.Module):
    """Causal attention of every token to its own sequence; Megatron builds and calls it as its core attention.

    Context parallelism exchanges tokens for heads (Jacobs et al. 2023, DeepSpeed-Ulysses): each rank computes whole
    sequences for its share of the heads. Rings would need the gradient of the log-sum-exp, which torch's kernel drops.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **unused: Any) -> None:
        """Options of Megatron's other attentions (masks, dropout, how ranks talk) have no meaning here."""
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **options: Any) -> Tensor:
        """[t, h * e] from query [t, h, d], key [t, g, d] and value [t, g, e], all of this rank's tokens and heads."""
        sequences: Sequences = options["packed_seq_params"]
        scale = 1 / math.sqrt(query.shape[-1]) if self._scale is None else self._scale
        if sequences.order is None:
            return attend(query, key, value, sequences.cu_seqlens, sequences.max_seqlen_q, scale=scale).flatten(1)
        group, size = mpu.get_context_parallel_group(), mpu.get_context_parallel_world_size()
        heads = _shared_heads(query.shape[1], key.shape[1], size)
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        inverse = torch.argsort(sequences.order)
        query, key, value = (_tokens(x, group)[inverse] for x in (query, key, value))
        out = attend(query, key, value, sequences.cu_seqlens, sequences.max_seqlen_q, scale=scale)
        whole: Tensor = _TokensForHeads.apply(out[sequences.order], group)  # type: ignore[no-untyped-call]
        return whole.flatten(1)


def _shared_heads(query_heads: int, key_heads: int, ranks: int) -> int:
    """Key heads after repeating them, so that every rank gets those of its query heads."""
    heads = math.lcm(key_heads, ranks)
    return heads if query_heads % heads == 0 else query_heads


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part r of [ranks, ...] goes to rank r, which puts it where this rank's number says."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def _to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[t, h, d] of this rank's tokens to [ranks * t, h / ranks, d] of this rank's heads."""
    tokens, heads, size = x.shape
    ranks = group.size()
    parts = x.view(tokens, ranks, heads // ranks, size).transpose(0, 1)
    return _exchange(parts, group).reshape(ranks * tokens, heads // ranks, size)


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back."""
    ranks = group.size()
    tokens, heads, size = x.shape[0] // ranks, x.shape[1], x.shape[2]
    parts = _exchange(x.view(ranks, tokens, heads, size), group)
    return parts.transpose(0, 1).reshape(tokens, ranks * heads, size)


def _tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    tokens: Tensor = _HeadsForTokens.apply(x, group)  # type: ignore[no-untyped-call]
    return tokens


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grads[0].contiguous(), ctx.group), None


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grads[0].contiguous(), ctx.group), None
