"""Of which modules Megatron shall build its layers: its own, with our attention and norms."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp

from .attention import PackedAttention
from .norm import RMSNorm

NORMS = ("input_layernorm", "pre_mlp_layernorm")
HEAD_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")


def block_spec(config: TransformerConfig, *, chunk: int | None) -> Any:
    """Layers of this pipeline rank, of its group ``chunk`` where it has several."""
    spec = copy.deepcopy(
        get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, vp_stage=chunk
        )
    )
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        _replace_norms(layer.submodules, NORMS)
        _replace_norms(attention, HEAD_NORMS)
    spec.layer_norm = RMSNorm
    return spec


def _replace_norms(submodules: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(submodules, name, IdentityOp) is not IdentityOp:
            setattr(submodules, name, RMSNorm)
