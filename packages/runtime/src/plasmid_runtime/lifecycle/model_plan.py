"""Check from ``config.json`` whether a recipe's models can be split over its ranks as configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plasmid.components import PlanRow
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid_models.folder import read_text_config

DESCRIPTIONS = "models"
"""Folder next to recipes. Its subfolders, named like the model folders, contain the ``config.json`` of each model."""


def plan_models(config: RunConfig, *, recipes: Sequence[Path] = ()) -> list[PlanRow]:
    """Plan the layout of the recipe's models on trainer and engine. Raises `ConfigError` if it is impossible.

    For models that do not exist locally, uses their description in the folder `DESCRIPTIONS` next to ``recipes``.
    """
    place, rows = config.placement, list[PlanRow]()
    for table, path in config.needed_models.items():
        model, origin = find_config(table, Path(path), recipes)
        own = next((count for role, count in place.role_ranks.items() if role.value == table), 0)
        planned = list(config.trainer.plan(model, own or place.trainer_ranks))
        if table == "model":
            rows += [("model", str(model.get("model_type", "")), str(origin)), *planned]
            if config.rollout is not None:
                rows += config.rollout.plan(model, place.engine_ranks)
    return rows


def find_config(table: str, path: Path, recipes: Sequence[Path]) -> tuple[Mapping[str, Any], Path]:
    """Read the model's ``config.json``; also returns its folder. Raises `ConfigError` or `ModelError`."""
    described = [recipe.parent / DESCRIPTIONS / path.name for recipe in recipes]
    for folder in (path, *described):
        if (folder / "config.json").is_file():
            return read_text_config(table, folder), folder
    searched = f", nor has {described[0]}" if described else ""
    raise ConfigError(f"{table}.path: {path} has no config.json{searched}; put the model's config.json there")
