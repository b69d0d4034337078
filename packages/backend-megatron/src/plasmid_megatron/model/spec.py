"""Layer specs: Megatron's own modules with Plasmid's attention and norms, or TransformerEngine's modules."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP

from ..weights.families import Family
from .attention import PackedAttention
from .experts import GroupedExperts
from .modules import LatentAttention
from .norm import RMSNorm
from .transformer_engine import IMPL, engine_block_spec

NORMS = ("input_layernorm", "pre_mlp_layernorm")
HEAD_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")


def block_spec(config: TransformerConfig, *, chunk: int | None, family: Family) -> Any:
    """Return the spec of this pipeline rank's layers, for its model chunk ``chunk`` if it has several.

    ``family`` may change each layer.
    """
    ours = config.transformer_impl != IMPL
    spec = copy.deepcopy(_local_block_spec(config, chunk) if ours else engine_block_spec(config, chunk=chunk))
    for layer in spec.layer_specs:
        family.change_layer(layer.submodules)
        if ours:
            _replace_parts(config, layer.submodules)
    if ours:
        spec.layer_norm = RMSNorm
    return spec


def _local_block_spec(config: TransformerConfig, chunk: int | None) -> Any:
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=chunk
    )


def _replace_parts(config: TransformerConfig, layer: Any) -> None:
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        layer.self_attention.module = LatentAttention
    experts = getattr(layer.mlp.submodules, "experts", None)
    if experts is not None and experts.module is SequentialMLP:
        experts.module = GroupedExperts
    _replace_norms(layer, NORMS)
    _replace_norms(attention, HEAD_NORMS)


def _replace_norms(submodules: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(submodules, name, IdentityOp) is not IdentityOp:
            setattr(submodules, name, RMSNorm)
