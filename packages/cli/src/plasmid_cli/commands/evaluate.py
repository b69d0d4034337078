"""`rl eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..recipe_arguments import Items, PluginFiles, load

Model = Annotated[
    Path | None, typer.Option("--model", metavar="FOLDER", help="Model to evaluate instead of the recipe's.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def evaluate(items: Items, model: Model = None, plugin: PluginFiles = None, as_json: Json = False) -> None:
    """Evaluate a model on the recipe's evaluation sets: rl eval recipe.toml --model runs/mine/final"""
    from plasmid.errors import ConfigError
    from plasmid.run.preflight import check
    from plasmid.run.evaluate import evaluate as run

    config = load(items, plugin, more=[] if model is None else [f"model.path={json.dumps(str(model))}"])
    if not config.eval:
        raise ConfigError("eval: the recipe has no evaluation set; add an [[eval]] table")
    check(config)
    found = run(config)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.table import Table

    from ..output import table_console

    table = Table("set", "metric", "value", box=None)
    for name, metrics in found.items():
        for metric, value in metrics.items():
            table.add_row(name, metric.removeprefix(f"eval/{name}/"), f"{value:.4g}")
    table_console().print(table, highlight=False)
