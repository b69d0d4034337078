"""Models without batch-invariant kernels, recognized by their configuration. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from plasmid.components import RecipeView
from plasmid.errors import ModelError

from ..estimates.shape import num_experts
from ..folder import read_text_config
from ..linear_attention import Config


def check_invariant_models(recipe: RecipeView) -> None:
    """Raise `ModelError` if ``run.deterministic`` does not support one of the recipe's models."""
    for where, folder in recipe.needed_models.items() if recipe.deterministic else ():
        if kind := _find_variant_layers(read_text_config(where, Path(folder))):
            raise ModelError(
                f"run.deterministic: {where}.path = {folder} has {kind}, for which there are no batch-invariant "
                "kernels; choose a dense model with full attention, or remove the setting"
            )


def _find_variant_layers(model: Config) -> str | None:
    """Name layers that have no batch-invariant kernels; None if there are none."""
    if count := num_experts(model):
        return f"{count} experts per layer"
    kinds = model.get("layer_types") or ()
    for kind in kinds:
        if kind != "full_attention":
            return f"layers of kind {kind!r}"
    window = model.get("sliding_window")
    if window and not kinds and model.get("use_sliding_window", True):
        return f"sliding-window attention (window {window})"
    return None
