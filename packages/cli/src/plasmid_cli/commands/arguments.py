"""What stands after `rl train` and `rl eval`: recipe files and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
TrustRecipe = Annotated[
    bool,
    typer.Option(
        "--trust-recipe",
        help="Take all settings of the recipe in the folder, also those that import files, start or reach something.",
    ),
]


def load(items: Sequence[str], plugins: Sequence[Path] | None, *, more: Sequence[str] = ()) -> RunConfig:
    """The configuration that the arguments describe; ``more`` are overrides from options. Raises `ConfigError`."""
    from plasmid import load_config
    from plasmid.errors import ConfigError

    for item in items:
        if "=" not in item and not item.endswith(".toml") and ("/" in item or Path(item).exists()):
            raise ConfigError(f"{item}: is no recipe; the name of a recipe ends in .toml")
    recipes = [item for item in items if _is_recipe(item)]
    overrides = [item for item in items if not _is_recipe(item)]
    if not recipes and all("=" in item for item in overrides):
        raise ConfigError("no recipe given; name a TOML file, for example recipes/smollm2-sums-cpu.toml")
    return load_config(recipes, [*overrides, *more], plugins=plugins or ())


def check_sampling_overrides(config: RunConfig, items: Sequence[str], *, eval_set: str = "") -> None:
    """Raise `ConfigError` if ``sampling.*`` given here does not reach an evaluation set that sets the same itself."""
    from plasmid.config.load import parse_override
    from plasmid.errors import ConfigError

    given: set[str] = set()
    for item in items:
        table = {} if _is_recipe(item) else parse_override(item).get("sampling", {})
        given |= set(table) if isinstance(table, Mapping) else set()
    tables = {f"profiles.{name}.sampling": profile.sampling for name, profile in config.profiles.items()}
    sets = [(i, set_) for i, set_ in enumerate(config.eval) if set_.name == eval_set or not eval_set]
    tables |= {f"eval.{i}.sampling": set_.sampling for i, set_ in sets}
    lines = []
    for place, sampling in tables.items():
        for name, value in ({} if sampling is None else sampling.explicit()).items():
            if name in given and value != getattr(config.sampling, name):
                lines.append(
                    f"{place}.{name}: is {value!r}, which comes before sampling.{name} of the command line; "
                    f"set {place}.{name} there"
                )
    if lines:
        raise ConfigError("\n".join(lines))


def _is_recipe(item: str) -> bool:
    return item.endswith(".toml") and "=" not in item
