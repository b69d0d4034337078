"""Linear attention in packed rows: its state and its convolution must not mix samples. B samples, W maximum length."""

from __future__ import annotations

from typing import Any

from plasmid_models.linear_attention import LINEAR_FAMILIES
from torch import Tensor, nn
from transformers import PreTrainedModel

OF_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that describe the samples of a packed row."""


def separate_samples(lm: PreTrainedModel) -> None:
    """Let each layer with linear attention compute the samples of a packed row as a block, padded on the right.

    All other modules process the packed row. The arguments of the decoder must contain a ``packed_block``; without it,
    the input is taken to be a padded block already.
    """
    for module in gated_delta_nets(lm):
        module.register_forward_pre_hook(_unpack, with_kwargs=True)
        module.register_forward_hook(_pack, with_kwargs=True)


def gated_delta_nets(lm: PreTrainedModel) -> list[nn.Module]:
    """Return the gated delta nets of a model; none for families without linear attention."""
    is_known = lm.config.model_type in LINEAR_FAMILIES
    return [module for name, module in lm.named_modules() if is_known and name.endswith(".linear_attn")]


def _unpack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass hidden states [B, W, H] instead of [1, t, H], without the arguments for kernels that take packed rows."""
    block = kwargs.get("packed_block")
    if block is None:
        return args, kwargs
    others = {name: value for name, value in kwargs.items() if name not in OF_ROW}
    return args, others | {"hidden_states": block.unpack(kwargs["hidden_states"][0])}


def _pack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    """Return [1, t, H] from [B, W, H]."""
    block = kwargs.get("packed_block")
    return output if block is None else block.pack(output.flatten(0, 1))[None]
