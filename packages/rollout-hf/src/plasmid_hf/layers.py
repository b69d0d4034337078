"""Kinds of layers that the engine decodes, according to the config of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plasmid.errors import ModelError

DECODED = {"full_attention", "linear_attention", "sliding_attention"}


def check_layers(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse layers of other kinds, which might silently compute something else. Raises `ModelError`."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    kinds = config.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    others = sorted({str(kind) for kind in kinds} - DECODED)
    if others:
        raise ModelError(
            f"model.path: {path} has layers of kind {others[0]!r}, which engine 'hf' does not support; choose another "
            "model or engine"
        )
