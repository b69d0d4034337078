"""Layer specs: Megatron's own modules with Plasmid's attention and norms, or TransformerEngine's modules."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ..model.attention import PackedAttention
from ..model.experts import GroupedExperts
from ..model.modules import LatentAttention, RMSNorm
from ..model.transformer_engine import IMPL, engine_block_spec
from ..weights.bridge import Architecture

NORMS = ("input_layernorm", "pre_mlp_layernorm")
HEAD_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")


def block_spec(architecture: Architecture, *, chunk: int | None) -> Any:
    """Return the spec of this pipeline rank's layers, for its model chunk ``chunk`` if it has several.

    The family may change each layer.
    """
    config = architecture.config
    ours = config.transformer_impl != IMPL
    spec = copy.copy(_local_block_spec(config, chunk) if ours else engine_block_spec(config, chunk=chunk))
    spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]  # equal layers share one spec object
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    for number, layer in enumerate(spec.layer_specs, start=first):
        architecture.family.change_layer(layer.submodules, architecture.hf, number)
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
    if attention is not None:  # a gated delta net has none
        attention.core_attention = PackedAttention
        _replace_norms(attention, HEAD_NORMS)
    if config.multi_latent_attention:
        layer.self_attention.module = LatentAttention
    experts = getattr(layer.mlp.submodules, "experts", None)
    if experts is not None and experts.module is SequentialMLP:
        experts.module = GroupedExperts
    _replace_norms(layer, NORMS)


def _replace_norms(submodules: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(submodules, name, IdentityOp) is not IdentityOp:
            setattr(submodules, name, RMSNorm)
