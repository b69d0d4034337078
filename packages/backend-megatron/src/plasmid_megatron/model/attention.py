"""Attention within packed sequences without TransformerEngine. t tokens, h query heads, g key heads, d head size."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from plasmid_training.batches.context_parallel import join_heads, split_heads
from plasmid_training.batches.packed_attention import attend, dense_attention
from torch import Tensor, nn
from torch.nn.functional import pad

from .packing import Sequences


class PackedAttention(nn.Module):
    """Causal attention within each packed sequence, used as Megatron's core attention.

    With context parallelism each rank computes whole sequences for its share of the heads. Attention sinks, logits
    of one more key per head whose value is 0, are the parameter ``softmax_offset`` [h], as in Megatron's own attention.
    """

    softmax_offset: Tensor | None

    def __init__(self, config: Any, layer_number: int = 1, softmax_scale: float | None = None, **unused: Any) -> None:
        """``unused`` are options of Megatron's other attention modules (masks, dropout, communication)."""
        super().__init__()
        self._scale, self._interleaved = softmax_scale, config.rotary_interleaved
        windows, size = config.window_attn_skip_freq, config.window_size
        self._window = size[0] + 1 if is_layer_window_attention(size, windows, layer_number) else None
        self._rotates = not (config.no_rope_freq and config.no_rope_freq[layer_number - 1])
        self.register_parameter("softmax_offset", _sinks(config) if config.softmax_type == "learnable" else None)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **options: Any) -> Tensor:
        """Compute [t, h * e] from query [t, h, d], key [t, g, d], value [t, g, e] of this rank's tokens and heads.

        Applies rotary embeddings to the whole packed row, because Megatron would apply them sample by sample.
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

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded state dict of the sinks, which tensor-parallel ranks split by heads."""
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=mpu.get_tensor_model_parallel_group(),
            dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        )
        return found

    def _own_sinks(self, sequences: Sequences) -> Tensor | None:
        """Return the sinks of the heads that this rank computes."""
        if self.softmax_offset is None or sequences.order is None:
            return self.softmax_offset
        group = mpu.get_context_parallel_group()
        own: Tensor = self.softmax_offset.chunk(group.size())[group.rank()]
        return own

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        scale = 1 / math.sqrt(query.shape[-1]) if self._scale is None else self._scale
        options: dict[str, Any] = {"scale": scale, "window": self._window, "sinks": self._own_sinks(sequences)}
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


def _sinks(config: Any) -> nn.Parameter:
    """Create the sinks of this tensor-parallel rank's heads."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    sinks = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    return sinks


def rotate(x: Tensor, rotary: Tensor, *, interleaved: bool) -> Tensor:
    """Apply rotary embeddings to the first r dimensions of each head of ``x`` [t, h, d].

    ``rotary`` [2, t, 1, r] contains cosines and sines. Dimension i is paired with i + r / 2 or, if ``interleaved``,
    each even dimension with the next.
    """
    cos, sin = rotary.unbind()
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        swapped = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
    return torch.cat((rotated * cos + swapped * sin, rest), dim=-1)
