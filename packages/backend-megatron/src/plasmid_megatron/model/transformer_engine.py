"""Layers of TransformerEngine's modules, with Megatron-Core's spec. Written against its API, but never run."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from plasmid.errors import ModelError
from torch import nn

from .modules import LATENT_EPS

IMPL = "transformer_engine"
"""Value of `TransformerConfig.transformer_impl` for TransformerEngine."""


def engine_block_spec(config: TransformerConfig, *, chunk: int | None) -> Any:
    """Return the spec of this pipeline rank's layers.

    Raises `ModelError` if TransformerEngine is not installed or would compute a different function than the model.
    """
    if not te.HAVE_TE:
        raise ModelError(
            "trainer.transformer_engine: transformer_engine cannot be imported by the trainer's ranks; "
            "install it on their machines, or remove the setting"
        )
    if config.multi_latent_attention and config.layernorm_epsilon != LATENT_EPS:
        raise ModelError(
            f"trainer.transformer_engine: would use rms_norm_eps = {config.layernorm_epsilon:g} for the norms of "
            f"compressed queries, keys and values, whose epsilon is {LATENT_EPS:g}; remove the setting"
        )
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)


def mark_parts(chunk: nn.Module) -> None:
    """Mark every matrix with its tensor-parallel split, as Megatron's own layers do.

    TransformerEngine marks all matrices as split, including replicated ones, and marks experts, for which Megatron
    disables its communication, as split by rows.
    """
    rows = (te.TEColumnParallelLinear, te.TELayerNormColumnParallelLinear, te.TEColumnParallelGroupedLinear)
    columns = (te.TERowParallelLinear, te.TERowParallelGroupedLinear)
    for module in chunk.modules():
        if not isinstance(module, (te.TELinear, te.TELayerNormColumnParallelLinear, te.TEGroupedLinear)):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if name.startswith("weight"):
                weight.tensor_model_parallel = isinstance(module, rows + columns)
                weight.partition_dim = int(isinstance(module, columns))
