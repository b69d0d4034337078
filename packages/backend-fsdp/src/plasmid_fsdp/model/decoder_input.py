"""What the decoder is given of a microbatch: one packed row, or a padded block. B samples, T tokens, W the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from plasmid_training.batches.collate import Microbatch
from plasmid_training.batches.packed_attention import Block, attend, dense_attention
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

PACKED = "plasmid_packed"
"""Name of the packed attention in transformers' registry of attention functions."""
MAX_PADDING = 1.1
"""Tokens with padding over tokens, up to which a block of long samples is dense: cuDNN's attention over equal rows of
1,024 to 16,384 tokens takes about half the time of packed attention, and linear layers pay for the padding."""
LONG = 2048
"""Mean length from which a block is dense on a GPU; chosen between the lengths that were measured, not tuned."""
WIDTH_STEP = 512
"""Widths of dense blocks on a GPU are multiples of this: cuDNN takes 0.13 s to plan each new shape."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderInput:
    """Arguments of a transformers decoder, and where to find what it returns."""

    arguments: dict[str, Any]
    source: Tensor
    """[P] int64: which of the hidden states, flattened, predicts each token."""


def decoder_input(batch: Microbatch, attention: str) -> DecoderInput:
    """Lay a microbatch, which is on its device, out for a model with this attention implementation."""
    device, lengths = batch.token_ids.device, batch.lengths
    if attention != PACKED:
        return _padded(batch, max(lengths), masked=True)
    width, equal = max(lengths), min(lengths) == max(lengths)
    if device.type == "cuda" and sum(lengths) >= LONG * len(lengths):
        width = -(-width // WIDTH_STEP) * WIDTH_STEP
        if len(lengths) * width <= MAX_PADDING * sum(lengths):
            return _padded(batch, width, masked=False)
    if equal and device.type != "cuda":
        return _padded(batch, width, masked=False)
    return _packed(batch)


def _packed(batch: Microbatch) -> DecoderInput:
    device, lengths = batch.token_ids.device, batch.lengths
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    arguments = {
        "input_ids": batch.token_ids[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(device),
        "attention_mask": None,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "packed_block": None if device.type == "cuda" else Block.of(lengths, device),
    }
    return DecoderInput(arguments, batch.source)


def _padded(batch: Microbatch, width: int, *, masked: bool) -> DecoderInput:
    """[B, width] on the right; ``masked`` says so to attention that is not causal by itself."""
    device, lengths = batch.token_ids.device, batch.lengths
    places = _places(lengths, width).to(device)  # [T]
    ids = torch.zeros(len(lengths) * width, dtype=torch.int64, device=device)
    ids[places] = batch.token_ids
    arguments: dict[str, Any] = {
        "input_ids": ids.view(len(lengths), width),
        "position_ids": torch.arange(width, device=device).repeat(len(lengths), 1),
        "attention_mask": None,
    }
    if masked:
        filled = torch.zeros_like(ids)
        filled[places] = 1
        arguments["attention_mask"] = filled.view(len(lengths), width)
    return DecoderInput(arguments, places[batch.source])


def _places(lengths: Sequence[int], width: int) -> Tensor:
    return torch.cat([row * width + torch.arange(n) for row, n in enumerate(lengths)])


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    packed_block: Block | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[B, W, h, e] for transformers: of query [B, h, W, d], key and value, or of packed ones, where B is 1."""
    if cu_seq_lens_q is None or max_length_q is None:
        return dense_attention(query, key, value, scale=scaling, window=sliding_window).transpose(1, 2), None
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend(
        query, key, value, cu_seq_lens_q, max_length_q, scale=scaling, window=sliding_window, block=packed_block
    )
    return out[None], None


AttentionInterface.register(PACKED, packed_attention)


def packing_obstacle(model: PreTrainedModel) -> str | None:
    """Why samples of this model cannot be packed; None if they can."""
    mixers = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if mixers:
        return f"it has layers of kind {sorted(mixers)[0]!r}, which would mix packed samples"
    if not model._supports_attention_backend or not model._supports_sdpa:
        return "transformers has no exchangeable attention for its family"
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        return "its attention is soft-capped"
    return None
