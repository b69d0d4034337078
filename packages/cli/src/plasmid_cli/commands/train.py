"""`rl train`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import Items, PluginFiles, load

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
    if offline and (resume or replay is not None):
        raise ConfigError("--offline checks a recipe by itself; leave out --resume and --replay")
    config = load(items, plugin)
    if offline:
        _explain_offline(config, [Path(item) for item in items if item.endswith(".toml")])
    elif dry_run:
        _explain(config, resume=resume, replay=replay, rollouts_only=rollouts_only)
    else:
        _run(config, items, plugin or (), resume=resume, replay=replay, rollouts_only=rollouts_only)


def _explain(config: RunConfig, *, resume: bool, replay: Path | None, rollouts_only: bool) -> None:
    from contextlib import ExitStack

    from plasmid.types.runs import Mode
    from plasmid_runtime.lifecycle.preparation import prepare_run

    from ..display.dry_run import print_plan

    with ExitStack() as held:
        mode = Mode(resume=resume, replay=replay, rollouts_only=rollouts_only)
        start = prepare_run(config, mode, held, dry_run=True)
        print_plan(config, start.config, start.stream.facts(), start.models)


def _explain_offline(config: RunConfig, recipes: Sequence[Path]) -> None:
    from contextlib import ExitStack

    from plasmid_runtime.evaluation.sets import open_sets
    from plasmid_runtime.lifecycle.model_plan import plan_models
    from plasmid_runtime.lifecycle.preparation import open_data, with_planned_batches
    from plasmid_runtime.lifecycle.validation import text_encoder

    from ..display.dry_run import print_plan

    models, encode = plan_models(config, recipes=recipes), text_encoder(config, offline=True)
    with ExitStack() as held:
        facts = open_data(config, encode, held).facts()
        open_sets(config, encode)
        print_plan(config, with_planned_batches(config, facts), facts, models)


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

    from ..display.progress import make_progress
    from ..output import output_console
    from ..reports.summary import print_summary

    console = output_console()
    with make_progress(config, console) as progress:
        result = run(config, resume=resume, replay=replay, rollouts_only=rollouts_only, observers=[progress])
    print_summary(result, console)
    if result.was_finished:
        further = "raise run.batches" if result.steps >= config.run.batches else "start a new run: the data end here"
        console.print(f"all {result.steps} batches were trained before; to train further, {further}")
    if result.interrupted:
        options = [part for file in plugins for part in ("--plugin", str(file))]
        command = shlex.join(["rl", "train", *items, *options, "--resume"])
        console.print(f"interrupted after batch {result.steps}; continue with: {command}", soft_wrap=True)
        raise typer.Exit(130)
