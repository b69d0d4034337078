"""What stands after `rl train` and `rl eval`: recipe files and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plasmid import RunConfig

Items = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE|KEY=VALUE", help="Recipe files, merged left to right, then settings: trainer.lr=2e-6"
    ),
]
OptionalItems = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE|KEY=VALUE", help="Recipe files, merged left to right, then settings: run.seed=1"),
]
PluginFiles = Annotated[
    list[Path] | None, typer.Option("--plugin", metavar="FILE", help="Python file with hooks to load as a plugin.")
]


def load(items: Sequence[str], plugins: Sequence[Path] | None, *, more: Sequence[str] = ()) -> RunConfig:
    """The configuration that the arguments describe; ``more`` are overrides from options. Raises `ConfigError`."""
    from plasmid import load_config
    from plasmid.errors import ConfigError

    for item in items:
        if "=" not in item and not item.endswith(".toml") and ("/" in item or Path(item).exists()):
            raise ConfigError(f"{item}: is no recipe; the name of a recipe ends in .toml")
    recipes = [item for item in items if item.endswith(".toml") and "=" not in item]
    overrides = [item for item in items if item not in recipes]
    if not recipes and all("=" in item for item in overrides):
        raise ConfigError("no recipe given; name a TOML file, for example recipes/smollm2-sums-cpu.toml")
    return load_config(recipes, [*overrides, *more], plugins=plugins or ())
