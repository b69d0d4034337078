"""Formats of quantized weights that are dequantized when read, by the ``quantization_config`` of a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fp8_blocks import Fp8Blocks
from .mxfp4 import Mxfp4

KEY = "quantization_config"
Format = Fp8Blocks | Mxfp4


def weight_format(config: Mapping[str, Any]) -> Format | None:
    """Return the format of a folder's quantized weights; None if they are not quantized.

    Raises ValueError for other formats.
    """
    found = config.get(KEY)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    if isinstance(found, Mapping) and method == "mxfp4":
        return Mxfp4()
    size = found.get("weight_block_size") if isinstance(found, Mapping) and method == "fp8" else None
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 0 < n < 1 << 20 for n in size):
        raise ValueError(
            f"the model's weights are quantized ({str(method)[:40]}); only fp8 with weight_block_size and mxfp4 can be "
            "read: use a copy in bfloat16"
        )
    return Fp8Blocks((size[0], size[1]))


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Return True if weights are stored in one of these formats."""
    try:
        return weight_format(config) is not None
    except ValueError:
        return False


def remove_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the same model after its weights are dequantized."""
    return {key: value for key, value in config.items() if key != KEY} if is_quantized(config) else config


def forget_quantization(config: Any) -> None:
    """Remove the quantization from transformers' config object, so that models are built for unquantized weights."""
    if is_quantized(config.to_dict()):
        del config.quantization_config
