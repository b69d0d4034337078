"""Decoder inputs of a microbatch: one packed row or a padded block. B samples, T tokens, W maximum length.

With context parallelism, each rank has a part of the row or block. P predicted tokens of a microbatch, of which p are
predicted from tokens of this rank; otherwise p = P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from plasmid_models.kernels.invariant import Spans
from plasmid_models.linear_attention import LINEAR, LINEAR_FAMILIES
from plasmid_training.batches.collate import Microbatch
from plasmid_training.batches.context_parallel import ContextTokens
from plasmid_training.batches.packed_attention import Block, attend, dense_attention, dense_width
from plasmid_training.batches.prefix_attention import PrefixLayout, prefix_layout
from plasmid_training.head.head_options import Targets
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from .context_part import ContextPart, split_arguments
from .invariant_attention import INVARIANT

PACKED = "plasmid_packed"
"""Name of the packed attention in transformers' registry of attention functions."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderInput:
    """Arguments of a transformers decoder, and the positions of interest in its output."""

    arguments: dict[str, Any]
    source: Tensor
    """[p] int64: index into the flattened hidden states of the position that predicts each token."""
    places: Tensor | None = None
    """[T] int64: index of each token in the row or block; None if these are 0..T-1."""
    part: ContextPart | None = None
    """This rank's part of the row or block; None without context parallelism."""
    own: ContextTokens | None = None
    """The predicted tokens of this rank; None without context parallelism."""

    def place(self, experts: Tensor | None) -> Tensor | None:
        """Return the experts of the T tokens in the order of the hidden states; -1 for padding."""
        if experts is None:
            return None
        if self.places is not None:
            count = self.arguments["input_ids"].numel() if self.part is None else self.part.num_tokens
            placed = experts.new_full((count, *experts.shape[1:]), -1)
            placed[self.places] = experts
            experts = placed
        return experts if self.part is None else self.part.of(experts, padding=-1)

    def targets(self, batch: Microbatch) -> Targets:
        """Return the p tokens of the microbatch to score."""
        every = Targets(
            ids=batch.targets, temperatures=batch.temperatures, kept=batch.kept, top_ids=batch.teacher_top_ids
        )
        return every if self.own is None else self.own.select(every)


def decoder_input(
    batch: Microbatch,
    attention: str,
    dtype: torch.dtype,
    context: dist.ProcessGroup | None = None,
    *,
    linear: bool = False,
) -> DecoderInput:
    """Build the decoder input of a microbatch, which is on its device, for a model with this attention implementation.

    ``dtype`` is the model's compute dtype. The ranks of ``context`` split the tokens, for which they need packed
    attention. Layers with ``linear`` attention need samples as a block. Raises ValueError for shared prefixes without
    packed attention, or with linear attention.
    """
    rows = _decoder_input(batch, attention, dtype, linear)
    if context is None:
        return rows
    arguments, part = split_arguments(rows.arguments, context)
    source = rows.source - part.start
    here = ((source >= 0) & (source < part.size)).nonzero()[:, 0]
    own = ContextTokens(places=here, num_predicted=batch.num_predicted, group=context)
    return DecoderInput(arguments, source[here], rows.places, part, own)


def _decoder_input(batch: Microbatch, attention: str, dtype: torch.dtype, linear: bool) -> DecoderInput:
    if attention == INVARIANT:
        return _pack_invariant(batch)
    if batch.prefix_lengths:
        if linear:
            raise ValueError("shared prefixes cannot be used with linear attention")
        return _pack_shared(batch, attention, dtype)
    if attention != PACKED:
        return _pad(batch, max(batch.lengths), masked=True)
    width = dense_width(batch.lengths, batch.token_ids.device)
    return _pack(batch, linear) if width is None else _pad(batch, width, masked=False)


def _positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return [1, t] the position of each token of a packed row in its sample."""
    return torch.cat([torch.arange(n) for n in lengths])[None].to(device)


def _pack(batch: Microbatch, linear: bool) -> DecoderInput:
    device, lengths = batch.token_ids.device, batch.lengths
    needs_block = linear or device.type != "cuda"
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    arguments = {
        "input_ids": batch.token_ids[None],
        "position_ids": _positions(lengths, device),
        "attention_mask": None,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "packed_block": Block.of(lengths, device) if needs_block else None,
    }
    return DecoderInput(arguments, batch.source)


def _pack_invariant(batch: Microbatch) -> DecoderInput:
    """Build a packed row for `invariant_attention`."""
    device, lengths = batch.token_ids.device, batch.lengths
    arguments = {
        "input_ids": batch.token_ids[None],
        "position_ids": _positions(lengths, device),
        "attention_mask": None,
        "spans": Spans.packed(lengths, device),
        "bounds": torch.tensor([0, *lengths]).cumsum(0).int().to(device),
    }
    return DecoderInput(arguments, batch.source)


def _pack_shared(batch: Microbatch, attention: str, dtype: torch.dtype) -> DecoderInput:
    """Build a packed row that contains shared prefixes once."""
    if attention != PACKED:
        raise ValueError(f"shared prefixes need packed attention, not {attention!r}")
    device = batch.token_ids.device
    spans = zip(batch.prefix_lengths, batch.lengths, strict=True)
    arguments = {
        "input_ids": batch.token_ids[None],
        "position_ids": torch.cat([torch.arange(start, end) for start, end in spans])[None].to(device),
        "attention_mask": None,
        "prefix_layout": prefix_layout(batch, device, dtype),
    }
    return DecoderInput(arguments, batch.source)


def _pad(batch: Microbatch, width: int, *, masked: bool) -> DecoderInput:
    """Build a block [B, width], padded on the right; ``masked`` adds an attention mask."""
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
    return DecoderInput(arguments, places[batch.source], places)


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
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    packed_block: Block | None = None,
    prefix_layout: PrefixLayout | None = None,
    context_part: ContextPart | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: [B, W, h, e] from query [B, h, W, d], key and value; B is 1 if packed.

    With a ``context_part``, [1, n, h, e] from [1, h, n, d] of the n tokens of this rank.
    """
    options: dict[str, Any] = {"scale": scaling, "window": sliding_window, "sinks": s_aux}
    if context_part is not None:
        query, key, value = context_part.gather_tokens(query, key, value)
        options["sinks"] = None if s_aux is None else context_part.select_heads(s_aux)
    if prefix_layout is not None:
        out = prefix_layout.attend(*_drop_batch_axis(query, key, value), **options)
    elif cu_seq_lens_q is not None and max_length_q is not None:
        out = attend(*_drop_batch_axis(query, key, value), cu_seq_lens_q, max_length_q, block=packed_block, **options)
    else:
        out = dense_attention(query, key, value, **options).transpose(1, 2)
    out = out if out.ndim == 4 else out[None]
    return out if context_part is None else context_part.scatter_tokens(out), None


def _drop_batch_axis(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [t, h, d] each from [1, h, t, d]."""
    return query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)


AttentionInterface.register(PACKED, packed_attention)


def packing_obstacle(model: PreTrainedModel) -> str | None:
    """Return the reason why samples of this model cannot be packed; None if they can."""
    is_compared = model.config.model_type in LINEAR_FAMILIES
    known = {"full_attention", "sliding_attention"} | ({LINEAR} if is_compared else set())
    mixers = set(getattr(model.config, "layer_types", None) or ()) - known
    if mixers:
        return f"it has layers of kind {sorted(mixers)[0]!r}, which mix packed samples"
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    is_configurable = model._supports_attention_backend or is_compared  # not declared for linear attention
    if not is_configurable or not (model._supports_sdpa or has_sinks):
        return "transformers has no configurable attention for its family"
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        return "it caps attention scores (soft-capping)"
    return None
