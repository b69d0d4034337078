"""Layers made of TransformerEngine's modules, by Megatron-Core's own plan. Written against its API, and never run."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from plasmid.errors import ModelError
from torch import nn

IMPL = "transformer_engine"
"""What `TransformerConfig.transformer_impl` says of layers that are made of it."""


def engine_block_spec(config: TransformerConfig, *, chunk: int | None) -> Any:
    """Layers of this pipeline rank, of its group ``chunk`` where it has several. Raises `ModelError` without it."""
    if not te.HAVE_TE:
        raise ModelError(
            "trainer.transformer_engine: transformer_engine cannot be imported where the trainer's ranks run; "
            "install it there, or remove the setting"
        )
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)


def mark_parts(chunk: nn.Module) -> None:
    """Say of every matrix how the ranks of tensor parallelism split it, as Megatron's own layers do.

    TransformerEngine marks all of them as split, those that every rank has whole as well, and by rows where Megatron
    keeps it from talking to other ranks (experts).
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
