"""`rl plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..commands.arguments import Items, PluginFiles, load

if TYPE_CHECKING:
    from plasmid import RunConfig

Gpu = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="GPU to plan for: h100, h200, a100, ...")]
Price = Annotated[float | None, typer.Option("--price", min=0.0, metavar="MONEY", help="Price of one GPU per hour.")]
PromptTokens = Annotated[int | None, typer.Option("--prompt-tokens", min=1, help="Mean number of tokens per prompt.")]
ResponseTokens = Annotated[
    int | None,
    typer.Option("--response-tokens", min=1, help="Mean number of tokens per completion or demonstrated answer."),
]


def plan(
    items: Items,
    gpu: Gpu = None,
    price: Price = None,
    prompt_tokens: PromptTokens = None,
    response_tokens: ResponseTokens = None,
    plugin: PluginFiles = None,
) -> None:
    """Estimate memory, time and cost of a run, without a GPU: rl plan recipe.toml --gpu h100 --price 2.5

    If the run does not fit, prints the smallest change that makes it fit, and exits with 1.
    """
    from plasmid.errors import ConfigError
    from plasmid_runtime.planning.changes import find_change
    from plasmid_runtime.planning.load import Lengths, batch_load, read_lengths
    from plasmid_runtime.planning.offload import choose_offload
    from plasmid_runtime.planning.plan import Plan, choose_device, make_plan

    from ..output import output_console
    from .tables import print_advice, print_plan

    config = load(items, plugin)
    models = _models(config, [Path(item) for item in items if item.endswith(".toml")])
    device, why = choose_device(config, gpu)
    if price is not None and device is None:
        raise ConfigError("--price: is per GPU hour, but the plan has no GPU; name one with --gpu, such as --gpu h100")
    lengths = read_lengths(config, Lengths(prompt=prompt_tokens, response=response_tokens))

    def make(changed: RunConfig) -> Plan:
        return make_plan(changed, models, device, batch_load(changed, models["model"], lengths)[0])

    config, _ = choose_offload(config, make)
    found, (_, assumed) = make(config), batch_load(config, models["model"], lengths)
    console = output_console()
    print_plan(found, console, models=models, why=why, assumed=assumed, price=price)
    if not found.fits:
        print_advice(found, find_change(found, make), console)
        raise typer.Exit(1)


def _models(config: RunConfig, recipes: list[Path]) -> dict[str, dict[str, object]]:
    """Read the ``config.json`` of each model that the run needs, by table, also of a critic that starts as the policy.

    For models that exist neither locally nor as a description next to a recipe, queries the Hub, without weights.
    """
    from plasmid.errors import ConfigError
    from plasmid_models.source import download_models
    from plasmid_runtime.lifecycle.model_plan import find_config
    from plasmid_runtime.planning.plan import add_critic_config

    def find_configs(config: RunConfig) -> dict[str, dict[str, object]]:
        paths = config.needed_models
        return {table: dict(find_config(table, Path(path), recipes)[0]) for table, path in paths.items()}

    try:
        found = find_configs(config)
    except ConfigError:
        local, _ = download_models(config, weights=False)
        found = find_configs(local)
    return add_critic_config(config, found)
