"""Attention within packed sequences, without TransformerEngine. t tokens, h query heads, g key heads, d head size."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

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
            return attend(query, key, value, sequences.cu_seqlens, sequences.max_seqlen_q, scale).flatten(1)
        group, size = mpu.get_context_parallel_group(), mpu.get_context_parallel_world_size()
        heads = _shared_heads(query.shape[1], key.shape[1], size)
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        inverse = torch.argsort(sequences.order)
        query, key, value = (_tokens(x, group)[inverse] for x in (query, key, value))
        out = attend(query, key, value, sequences.cu_seqlens, sequences.max_seqlen_q, scale)
        whole: Tensor = _TokensForHeads.apply(out[sequences.order], group)  # type: ignore[no-untyped-call]
        return whole.flatten(1)


def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
    """[t, h, e] of whole sequences that begin and end at ``cu_seqlens`` [n + 1]."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return _attend_one_by_one(query, key, value, cu_seqlens, scale)
    from torch.nn.attention.varlen import varlen_attn

    size = value.shape[-1]
    widest = max(query.shape[-1], size)
    query, key, value = (pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))  # MLA has unequal sizes
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)
    assert isinstance(out, Tensor), "a second result must be asked for"
    return out[..., :size]


def _attend_one_by_one(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """For what the packed kernel does not compute: the CPU, and fp32."""
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


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
