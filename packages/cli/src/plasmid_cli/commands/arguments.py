"""Arguments of `rl train` and `rl eval`: recipe files and overrides."""

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
        help="Use all settings of the folder's recipe, including those that import files, start programs or contact "
        "servers.",
    ),
]


def load(items: Sequence[str], plugins: Sequence[Path] | None, *, more: Sequence[str] = ()) -> RunConfig:
    """Load the configuration from the arguments; ``more`` are overrides from options. Raises `ConfigError`."""
    from plasmid import load_config
    from plasmid.errors import ConfigError

    for item in items:
        if "=" in item or item.endswith(".toml"):
            continue
        meant = Path(f"{item}.toml") if Path(item).suffix == "" else Path(item).with_suffix(".toml")
        if "/" in item or Path(item).exists() or meant.is_file():
            hint = f"; did you mean {meant}?" if meant.is_file() else ""
            raise ConfigError(f"{item}: not a recipe; its name must end in .toml{hint}")
    recipes = [item for item in items if _is_recipe(item)]
    overrides = [item for item in items if not _is_recipe(item)]
    if not recipes and all("=" in item for item in overrides):
        raise ConfigError("no recipe given; add a TOML file, for example recipes/smollm2-sums-cpu.toml")
    return load_config(recipes, [*overrides, *more], plugins=plugins or ())


def check_sampling_overrides(config: RunConfig, items: Sequence[str], *, eval_set: str = "") -> None:
    """Raise `ConfigError` if the recipe overrides a ``sampling.*`` setting of the command line in a narrower table."""
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
                    f"{place}.{name}: is {value!r}, which overrides sampling.{name} of the command line; "
                    f"set {place}.{name} on the command line"
                )
    if lines:
        raise ConfigError("\n".join(lines))


def _is_recipe(item: str) -> bool:
    return item.endswith(".toml") and "=" not in item
