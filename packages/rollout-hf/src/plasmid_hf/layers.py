"""Kinds of layers that the engine decodes, according to the config of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plasmid.errors import ModelError

DECODED = {"full_attention", "sliding_attention"}


def check_layers(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse layers with recurrent state, which would silently start from an empty state at every token.

    Configs written before Transformers had ``layer_types`` have the sizes of linear attention alone. Raises
    `ModelError`.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        kinds = ["linear_attention"] if config.get("linear_num_value_heads") else []
    others = sorted({str(kind) for kind in kinds} - DECODED)
    if others:
        raise ModelError(
            f"model.path: {path} has layers of kind {others[0]!r}, which engine 'hf' does not support; choose another "
            "model or engine"
        )
