"""Whether a recipe's models can be laid out as it says, from each one's ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plasmid.components import PlanRow
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid_models.folder import read_config
from plasmid_models.source import needed_models

DESCRIPTIONS = "models"
"""Folder beside recipes that has a folder with a ``config.json`` for each model, by the name of the model's own."""


def plan_models(config: RunConfig, *, recipes: Sequence[Path] = ()) -> list[PlanRow]:
    """How trainer and engine hold the recipe's models. Raises `ConfigError` where they cannot.

    A model that is not there is taken from its description in the folder `DESCRIPTIONS` beside one of ``recipes``.
    """
    place, rows = config.placement, list[PlanRow]()
    for table, path in needed_models(config):
        model, origin = _config_of(table, path, recipes)
        planned = list(config.trainer.plan(model, place.trainer_ranks))
        if table == "model":
            rows += [("model", str(model.get("model_type", "")), str(origin)), *planned]
            if config.rollout is not None:
                rows += config.rollout.plan(model, place.engine_ranks)
    return rows


def _config_of(table: str, path: Path, recipes: Sequence[Path]) -> tuple[Mapping[str, Any], Path]:
    """The model's ``config.json``, and the folder it was found in."""
    described = [recipe.parent / DESCRIPTIONS / path.name for recipe in recipes]
    for folder in (path, *described):
        if (folder / "config.json").is_file():
            return read_config(table, folder), folder
    looked = f", and {described[0]} does not describe it" if described else ""
    raise ConfigError(f"{table}.path: {path} has no config.json{looked}; put the model's config.json there")
