"""`rl eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .arguments import OptionalItems, PluginFiles, TrustRecipe, check_sampling_overrides

Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="PATH",
        help="Model folder, run folder, checkpoint, or model of the Hub, instead of the recipe's model.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Evaluate the model of this OpenAI-compatible or SGLang server."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def evaluate(
    context: typer.Context,
    items: OptionalItems = None,
    model: Model = None,
    url: Url = None,
    plugin: PluginFiles = None,
    trust_recipe: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Evaluate on the recipe's evaluation sets: rl eval recipe.toml --model runs/mine

    Without a recipe, uses the evaluation sets of the run or checkpoint. Exits with 1 if rollouts failed.
    """
    from plasmid.errors import ConfigError
    from plasmid_runtime.lifecycle.evaluate import evaluate as run

    from ..display.evaluations import count_failed, evaluation_table, progress_bars
    from ..output import print_line, print_warning, table_console, transcript
    from .eval_target import Target, find_target, load_target

    target = Target() if model is None else find_target(model)
    if url is not None and target.checkpoint is not None:
        raise ConfigError(
            "--url: evaluates the model of the server; remove --model, or give a folder with its tokenizer"
        )
    served = [] if url is None else ["rollout.kind=server", f"rollout.url={json.dumps(url)}"]
    # the server replaces the [rollout] table, to which settings of the command line then apply
    config = load_target(target, [*served, *(items or [])], plugin, trust=trust_recipe)
    if not config.eval:
        raise ConfigError("eval: the recipe has no evaluation set; add an [[eval]] table")
    check_sampling_overrides(config, items or [])
    with progress_bars() as observers:
        observers = [transcript(), *observers]
        found = run(config, checkpoint=target.checkpoint, observers=observers, make_cluster=context.obj)
    if as_json:
        print_line(json.dumps(found, indent=2))
    else:
        table_console().print(evaluation_table(found), highlight=False)
    if failed := count_failed(found):
        print_warning(f"{failed} rollouts failed and count as reward 0; the stored samples have their errors")
        raise typer.Exit(1)
