"""`rl train`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..recipe_arguments import Items, PluginFiles, load

if TYPE_CHECKING:
    from plasmid import RunConfig

DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the resolved configuration, stop.")]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline", help="With --dry-run: needs no model and no GPU; reads shapes from models/ by the recipe."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the newest run of this recipe from its checkpoint.")]
Replay = Annotated[
    Path | None,
    typer.Option("--replay", metavar="RUN", help="Train on the stored samples of this run; starts no engine."),
]
RolloutsOnly = Annotated[bool, typer.Option("--rollouts-only", help="Sample and score only; starts no trainer.")]


def train(
    items: Items,
    dry_run: DryRun = False,
    offline: Offline = False,
    resume: Resume = False,
    replay: Replay = None,
    rollouts_only: RolloutsOnly = False,
    plugin: PluginFiles = None,
) -> None:
    """Train a policy: rl train recipes/smollm2-sums-cpu.toml trainer.lr=1e-5"""
    from plasmid.errors import ConfigError

    if rollouts_only and (replay is not None or resume):
        raise ConfigError("--rollouts-only starts no trainer; leave out --replay and --resume")
    if replay is not None and resume:
        raise ConfigError("--replay begins a run of its own; leave out --resume")
    if offline and not dry_run:
        raise ConfigError("--offline checks a recipe without its models; add --dry-run")
    config = load(items, plugin)
    if dry_run:
        _explain(config, [Path(item) for item in items if item.endswith(".toml")], offline=offline)
    else:
        _run(config, items, plugin or (), resume=resume, replay=replay, rollouts_only=rollouts_only)


def _explain(config: RunConfig, recipes: Sequence[Path], *, offline: bool) -> None:
    from plasmid.run.preflight import check, check_data
    from plasmid.run.shapes import plan_models

    from ..dry_run import print_plan

    if not offline:
        check(config)
    models = plan_models(config, recipes=recipes if offline else ())
    print_plan(config, check_data(config, offline=offline), models)


def _run(
    config: RunConfig,
    items: Sequence[str],
    plugins: Sequence[Path],
    *,
    resume: bool,
    replay: Path | None,
    rollouts_only: bool,
) -> None:
    from plasmid import train as run
    from rich.console import Console

    from ..progress import make_progress
    from ..summary import print_summary

    console = Console()
    with make_progress(config, console) as progress:
        result = run(config, resume=resume, replay=replay, rollouts_only=rollouts_only, observers=[progress])
    print_summary(result, console)
    if result.was_finished:
        console.print(f"all {result.steps} batches were trained before; to train further, raise run.batches")
    if result.interrupted:
        options = [part for file in plugins for part in ("--plugin", str(file))]
        command = shlex.join(["rl", "train", *items, *options, "--resume"])
        console.print(f"interrupted after batch {result.steps}; continue with: {command}", soft_wrap=True, markup=False)
        raise typer.Exit(130)
