"""`rl train`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .arguments import Items, PluginFiles, load

if TYPE_CHECKING:
    from plasmid import RunConfig
    from plasmid.types.runs import Mode

DryRun = Annotated[bool, typer.Option("--dry-run", help="Validate, print the resolved configuration, and exit.")]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="With --dry-run: needs no weights or GPU; reads model configs from models/ next to the recipe.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the newest run of this recipe from its checkpoint.")]
ResumeAuto = Annotated[
    bool,
    typer.Option("--resume-auto", help="Resume, or start a new run if there is no checkpoint. Alias: --resume=auto."),
]
Replay = Annotated[
    Path | None,
    typer.Option("--replay", metavar="RUN", help="Train on the stored samples of this run; starts no engine."),
]
RolloutsOnly = Annotated[bool, typer.Option("--rollouts-only", help="Sample and score only; starts no trainer.")]
Supervise = Annotated[
    bool, typer.Option("--supervise", help="Restart the run from its newest checkpoint if one of its processes dies.")
]
MaxRestarts = Annotated[
    int,
    typer.Option("--max-restarts", min=1, help="With --supervise: maximum number of restarts between checkpoints."),
]
Hidden = Annotated[int, typer.Option(hidden=True)]


def train(
    items: Items,
    dry_run: DryRun = False,
    offline: Offline = False,
    resume: Resume = False,
    resume_auto: ResumeAuto = False,
    replay: Replay = None,
    rollouts_only: RolloutsOnly = False,
    supervise: Supervise = False,
    max_restarts: MaxRestarts = 5,
    supervisor: Hidden = -1,
    restarts: Hidden = 0,
    plugin: PluginFiles = None,
) -> None:
    """Train a policy: rl train recipes/smollm2-sums-cpu.toml trainer.lr=1e-5"""
    from ..interrupts import exit_on_interrupt

    began = time.monotonic()
    if supervise:
        from plasmid.errors import ConfigError

        if dry_run or offline or rollouts_only or replay is not None:
            raise ConfigError("--supervise: needs checkpoints; remove --dry-run, --rollouts-only and --replay")
        options = ["--resume-auto"] if resume_auto else ["--resume"] if resume else []
        _supervise(items, options, plugin or (), max_restarts)
    observers = []
    if supervisor >= 0:
        from ..supervision.reports import connect

        observers.append(connect(supervisor, restarts))
    with exit_on_interrupt():
        from plasmid.types.runs import Mode

        mode = Mode(resume="auto" if resume_auto else resume, replay=replay, rollouts_only=rollouts_only)
        _check_options(mode, dry_run=dry_run, offline=offline)
        config = load(items, plugin)
        if supervisor >= 0:
            _check_supervised(config)
        if offline:
            _explain_offline(config, [Path(item) for item in items if item.endswith(".toml")])
        elif dry_run:
            _explain(config, mode)
        else:
            _run(config, mode, items, plugin or (), observers, began)


def _supervise(items: Sequence[str], options: Sequence[str], plugins: Sequence[Path], max_restarts: int) -> NoReturn:
    """Run the same command without `--supervise` as a child process, and restart it as needed."""
    from ..supervision.supervisor import Supervisor

    common = [*items, *(word for file in plugins for word in ("--plugin", str(file)))]
    common += ["--traceback"] if "--traceback" in sys.argv else []

    def make_command(run_dir: str) -> list[str]:
        further = [f"run.dir={json.dumps(run_dir, ensure_ascii=False)}", "--resume-auto"] if run_dir else options
        return [sys.executable, "-P", "-m", "plasmid_cli", "train", *common, *further]

    raise typer.Exit(Supervisor(make_command, max_restarts=max_restarts).run())


def _check_options(mode: Mode, *, dry_run: bool, offline: bool) -> None:
    from plasmid.errors import ConfigError

    if mode.rollouts_only and (mode.replay is not None or mode.resume):
        raise ConfigError("--rollouts-only: starts no trainer; remove --replay and --resume")
    if mode.replay is not None and mode.resume:
        raise ConfigError("--replay: always starts a new run; remove --resume")
    if offline and not dry_run:
        raise ConfigError("--offline: only checks a recipe; add --dry-run")
    if offline and (mode.resume or mode.replay is not None):
        raise ConfigError("--offline: checks a recipe without a run; remove --resume and --replay")


def _check_supervised(config: RunConfig) -> None:
    from plasmid.errors import ConfigError

    if not config.checkpoint.optimizer:
        raise ConfigError(
            "checkpoint.optimizer: must be true with --supervise, because a run can be resumed only with the "
            "optimizer's state; remove the setting"
        )


def _explain(config: RunConfig, mode: Mode) -> None:
    from contextlib import ExitStack

    from plasmid_runtime.lifecycle.preparation import prepare_run

    from ..display.dry_run import print_plan

    with ExitStack() as resources:
        start = prepare_run(config, mode, resources, dry_run=True)
        print_plan(config, start.config, start.facts, start.models)


def _explain_offline(config: RunConfig, recipes: Sequence[Path]) -> None:
    from contextlib import ExitStack

    from plasmid_runtime.data.data_thread import DataThread
    from plasmid_runtime.evaluation.sets import open_sets
    from plasmid_runtime.lifecycle.model_plan import plan_models
    from plasmid_runtime.lifecycle.preparation import limit_batches, open_data
    from plasmid_runtime.lifecycle.validation import text_encoder

    from ..display.dry_run import print_plan

    models, encode = plan_models(config, recipes=recipes), text_encoder(config, offline=True)
    with ExitStack() as stack:
        _, facts = open_data(config, encode, stack, stack.enter_context(DataThread()))
        open_sets(config, encode)
        print_plan(config, limit_batches(config, facts), facts, models)


def _run(
    config: RunConfig,
    mode: Mode,
    items: Sequence[str],
    plugins: Sequence[Path],
    more: Sequence[object],
    began: float,
) -> None:
    from plasmid import train as run
    from plasmid_runtime.observe.progress import RunState

    from ..display.progress import make_log_progress, make_progress
    from ..output import output_console, transcript, transcript_console
    from ..reports.summary import print_summary

    console = output_console()
    with make_progress(config, console, RunState(config, started=began)) as progress:
        observers = [transcript(), progress, *more, *make_log_progress(config, console, transcript_console())]
        result = run(config, **asdict(mode), observers=observers, progress=False)
    print_summary(result, console)
    if result.was_finished:
        further = (
            "raise run.batches" if result.steps >= config.run.batches else "start a new run, since the data has ended"
        )
        console.print(f"all {result.steps} batches have already been trained; to train more, {further}")
    if result.interrupted:
        options = [part for file in plugins for part in ("--plugin", str(file))]
        way, what = ["--resume"], "continue"
        if not config.checkpoint.optimizer:  # cannot be resumed
            way, what = (
                [f"run.dir={result.run_dir}-2", f"checkpoint.start_from={result.checkpoint}"],
                "start from there",
            )
        command = shlex.join(["rl", "train", *items, *options, *way])
        console.print(f"interrupted after batch {result.steps}; {what} with: {command}", soft_wrap=True)
        raise typer.Exit(130)
