"""Attention within packed sequences without TransformerEngine. t tokens, h query heads, g key heads, d head size."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.utils import is_layer_window_attention
from plasmid_training.batches.context_parallel import join_heads, split_heads
from plasmid_training.batches.packed_attention import attend, dense_attention
from torch import Tensor, nn
from torch.nn.functional import pad

from .packing import Sequences


class PackedAttention(nn.Module):
    """Causal attention within each packed sequence, used as Megatron's core attention.

    With context parallelism each rank computes whole sequences for its share of the heads.
    """

    def __init__(self, config: Any, layer_number: int = 1, softmax_scale: float | None = None, **unused: Any) -> None:
        """Ignores options of Megatron's other attention modules (masks, dropout, communication)."""
        super().__init__()
        self._scale, self._interleaved = softmax_scale, config.rotary_interleaved
        windows, size = config.window_attn_skip_freq, config.window_size
        self._window = size[0] + 1 if is_layer_window_attention(size, windows, layer_number) else None
        self._rotates = not (config.no_rope_freq and config.no_rope_freq[layer_number - 1])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **options: Any) -> Tensor:
        """Compute [t, h * e] from query [t, h, d], key [t, g, d], value [t, g, e] of this rank's tokens and heads.

        Queries and keys are rotated here if the sequences have angles: Megatron would do it sample by sample.
        """
        sequences: Sequences = options["packed_seq_params"]
        is_local = self._window is not None and sequences.local_rotary is not None
        rotary = sequences.local_rotary if is_local else sequences.rotary
        if rotary is not None and self._rotates:
            query, key = (rotate(x, rotary, interleaved=self._interleaved) for x in (query, key))
        if sequences.order is None:
            return self._attend(query, key, value, sequences).flatten(1)
        group, inverse = mpu.get_context_parallel_group(), torch.argsort(sequences.order)
        query, key, value = (x[inverse] for x in split_heads(query, key, value, group))
        return join_heads(self._attend(query, key, value, sequences)[sequences.order], group).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        scale = 1 / math.sqrt(query.shape[-1]) if self._scale is None else self._scale
        options: dict[str, Any] = {"scale": scale, "window": self._window}
        if sequences.shared is not None:
            own = (x[: sequences.num_tokens] for x in (query, key, value))
            out = sequences.shared.attend(*own, **options)
            return pad(out, (0, 0, 0, 0, 0, len(query) - len(out)))
        if sequences.width is None:
            bounds, longest = sequences.cu_seqlens, sequences.max_seqlen_q
            return attend(query, key, value, bounds, longest, block=sequences.block, **options)
        width = sequences.width
        query, key, value = (x.view(-1, width, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        return dense_attention(query, key, value, **options).transpose(1, 2).flatten(0, 1)


def rotate(x: Tensor, rotary: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first r numbers of each head of ``x`` [t, h, d] by the angles of ``rotary`` [2, t, 1, r].

    The pairs are halves of the r numbers, or neighbours if ``interleaved``.
    """
    cos, sin = rotary.unbind()
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        crossed = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos + crossed * sin, rest), dim=-1)
