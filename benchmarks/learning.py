"""Record the held-out learning curves of a recipe, and compare them with committed ones.

    python benchmarks/learning.py recipes/smollm2-sums-cpu.toml --seeds 0 1 2 --out benchmarks/results/NAME.json
    python benchmarks/learning.py recipes/smollm2-sums-cpu.toml --seeds 0 1 2 --against benchmarks/results/NAME.json
    python benchmarks/learning.py RECIPE KEY=VALUE ... --runs DIR DIR DIR --device "4 x H100" --out FILE

The first command trains each seed with `rl train` and writes the curves. The second trains the seeds again, and exits
with 1 if they learn worse than the reference, 0 if they do not, and 2 if they cannot be compared. With `--runs`,
nothing is trained: the folders are those of finished runs of this recipe and settings, possibly on another machine.
`learning_curves.py`, next to this file, has the statistics of the comparison.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from learning_curves import Curve, Difference, Report, check_settings, compare, read_report
from plasmid.errors import ConfigError, PlasmidError
from plasmid_cli.commands.arguments import load
from plasmid_cli.display.curves import Series, chart
from plasmid_cli.display.tables import FittingTable
from plasmid_cli.output import print_error, print_line, table_console
from plasmid_cli.reports.run_data import RunData, load_run
from plasmid_runtime.observe.sample_store import read_table

ROOT = Path(__file__).resolve().parents[1]
UNRELATED = re.compile(
    r"run\.(dir|seed)|recipe|(checkpoint|trackers)(\..*)?|placement\.(address|offload_\w+)|.*_timeout_s"
)
"""Settings that may differ between two runs of a comparison. Of the model's path, the name must be the same."""

NOTHING_SAVED = ("checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.export=false")


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a resolved configuration by dotted key, without those in `UNRELATED`."""
    if UNRELATED.fullmatch(key):
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield key, Path(value).name if key == "model.path" else value
        return
    for name, one in items:
        yield from flatten(one, f"{key}.{name}" if key else str(name))


def read_curve(run: RunData, evaluation: str) -> Curve:
    """Return the curve of a run folder. Raises `ConfigError` if the run has not finished or cannot be used."""
    if "run" not in run.config or evaluation not in run.evaluations:
        raise ConfigError(f"{run.path}: has no config.json or no evaluations of {evaluation!r}; copy the whole folder")
    batches, rewards = run.evaluation_curve(evaluation)
    planned = run.config["run"]["batches"]
    if len(batches) < 2 or batches[-1] != planned:
        raise ConfigError(
            f"{run.path}: its last evaluation of {evaluation!r} is after batch {batches[-1] if batches else 'none'} of "
            f"{planned}; let the run finish"
        )
    if not all(0 <= reward <= 1 for reward in rewards):
        raise ConfigError(
            f"{run.path}: rewards of {evaluation!r} are not between 0 and 1, which the comparison requires"
        )
    times = [round(entry.metrics["perf/batch_s"], 3) for entry in run.metrics]
    return Curve(seed=run.config["run"]["seed"], batches=batches, rewards=[round(r, 5) for r in rewards], batch_s=times)


def count_samples(run: RunData, evaluation: str) -> int:
    """Return the number of samples of one evaluation, from the run's first sample file of it."""
    files = run.numbered_files(evaluation)
    if not files:
        raise ConfigError(
            f"{run.path}: has no samples of {evaluation!r} in samples/; give their number with --num-samples"
        )
    return len(read_table(files[min(files)], columns=("group_id",)))


def make_report(runs: Sequence[RunData], options: argparse.Namespace) -> Report:
    """Return the curves of run folders. Raises `ConfigError` unless they are runs of the recipe, of different seeds."""
    recipe, wanted = load(options.recipe, None), read_settings(options)
    evaluation = find_evaluation(runs[0], options.eval)
    settings = dict(flatten(runs[0].config))
    for run in runs:
        own = dict(flatten(run.config))
        check_settings(wanted, own, options.changed, names=("the recipe has", f"{run.path} has"))
        check_settings(settings, own, options.changed, names=(f"{runs[0].path} has", f"{run.path} has"))
    curves = [read_curve(run, evaluation) for run in runs]
    if len({curve.seed for curve in curves}) < len(curves):
        raise ConfigError(f"seeds: {[curve.seed for curve in curves]}: two runs have the same seed; leave one out")
    info = runs[0].info
    return Report(
        recipe=recipe.recipe,
        command=shlex.join(["rl", *train_arguments(options.recipe, "SEED")]),
        commit=options.commit or ("" if options.runs else read_commit()),
        device=options.device or find_device(recipe.placement.device),
        versions={"python": info.get("python", ""), **info.get("libraries", {})},
        evaluation=evaluation,
        num_samples=options.num_samples or count_samples(runs[0], evaluation),
        settings=settings,
        curves=sorted(curves, key=lambda curve: curve.seed),
    )


def read_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the recipe, without those that a run replaces by values for its machine."""
    config = load(options.recipe, None).model_dump(mode="json")
    return {key: value for key, value in flatten(config) if value != "auto"}


def find_evaluation(run: RunData, name: str | None) -> str:
    """Return the name of the evaluation set. Raises `ConfigError` if there is none or the choice is ambiguous."""
    names = sorted(run.evaluations)
    if name is None and len(names) != 1:
        raise ConfigError(f"{run.path}: has the evaluation sets {names}; choose one with --eval")
    if name is not None and name not in names:
        raise ConfigError(f"--eval: {run.path} has no evaluations of {name!r}; it has {names}")
    return name or names[0]


def train_arguments(recipe: Sequence[str], seed: int | str) -> list[str]:
    """Return the arguments of ``rl`` for one seed. Nothing is saved, because only the curve is needed."""
    return ["train", *recipe, f"run.seed={seed}", *NOTHING_SAVED]


def train(options: argparse.Namespace) -> Iterator[RunData]:
    """Train the seeds one after another, in subfolders of a new folder. Raises `PlasmidError` if a run fails."""
    name = load(options.recipe, None).recipe
    folder = options.folder or next(
        path for number in range(1, sys.maxsize) if not (path := ROOT / "runs" / f"learning-{name}-{number}").exists()
    )
    for seed in options.seeds:
        path = folder / f"seed-{seed}"
        arguments = [*train_arguments(options.recipe, seed), f"run.dir={path}"]
        print_line(shlex.join(["rl", *arguments]))
        code = subprocess.run([sys.executable, "-m", "plasmid_cli", *arguments], check=False).returncode
        if code:
            raise PlasmidError(f"seed {seed}: rl train ended with exit code {code}; its messages are above")
        yield load_run(path)


def read_commit() -> str:
    """Return the commit of the tree, with ``+`` if files differ from it; empty outside of a repository."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return "" if found.returncode else found.stdout.strip() + "+" * bool(changes.stdout)


def find_device(device: str) -> str:
    """Return a description of this machine's GPUs, or of its processor if there are none or the recipe runs on it."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return f"CPU, {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def print_curves(reports: Mapping[str, Report]) -> None:
    """Print the numbers of each seed, and a chart of the mean curves."""
    table = FittingTable(
        ("runs", "seed", "start", "area", "final", "batch, median s"),
        [
            (
                name,
                str(c.seed),
                f"{c.rewards[0]:.3f}",
                f"{c.area():.3f}",
                f"{c.final():.3f}",
                f"{median(c.batch_s):.2f}",
            )
            for name, report in reports.items()
            for c in report.curves
        ],
        num_heads=2,
        numbers=("seed", "start", "area", "final", "batch, median s"),
    )
    series = [
        Series(
            name=f"{name}, mean of {len(report.curves)}",
            x=report.curves[0].batches,
            y=[fmean(values) for values in zip(*(curve.rewards for curve in report.curves), strict=True)],
            marked=True,
        )
        for name, report in reports.items()
    ]
    console = table_console()
    for name, report in reports.items():
        versions = "".join(f", {library} {report.versions.get(library)}" for library in ("torch", "transformers"))
        print_line(f"{name}: {report.command}")
        print_line(f"    commit {report.commit or 'unknown'}, {report.device or 'unknown device'}{versions}")
    console.print(table)
    console.print(chart(series))


def print_comparison(found: Sequence[Difference]) -> None:
    """Print one line per compared number, and the result."""
    rows = [
        (
            one.name,
            f"{one.reference:.3f}",
            f"{one.new:.3f}",
            f"{one.new - one.reference:+.3f}",
            f"{one.limit:.3f}",
            "worse" if one.is_worse else "better" if one.is_better else "equal within noise",
        )
        for one in found
    ]
    columns = ("number", "reference", "new", "difference", "limit", "result")
    table_console().print(FittingTable(columns, rows, numbers=columns[1:5]))
    worse = [one.name for one in found if one.is_worse]
    print_line(f"worse than the reference: {', '.join(worse)}" if worse else "not worse than the reference")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="+", metavar="RECIPE|KEY=VALUE", help="recipe and settings, as for rl train")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="values of run.seed (default: 0 1 2)")
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: a new one in runs)")
    parser.add_argument("--runs", type=Path, nargs="+", help="folders of finished runs to use instead of training")
    parser.add_argument("--eval", help="name of the evaluation set (default: the only one)")
    parser.add_argument("--num-samples", type=int, help="samples of an evaluation (default: counted in sample files)")
    parser.add_argument("--device", default="", help="device that the runs used (default: that of this machine)")
    parser.add_argument("--commit", default="", help="commit of the runs (default: that of this tree)")
    parser.add_argument("--out", type=Path, help="file to write the curves to, after every seed")
    parser.add_argument("--against", type=Path, metavar="REFERENCE", help="file of curves to compare with")
    parser.add_argument("--changed", nargs="+", default=[], metavar="KEY", help="settings that may differ")
    options = parser.parse_intermixed_args(argv)
    if options.runs and options.out and not options.device:
        parser.error("--device: is required with --runs and --out; name the device that the runs used")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if the curves are worse than the reference, 2 after an error."""
    options = parse(argv)
    try:
        reference = read_report(options.against) if options.against else None
        if reference:  # before hours of training
            names = ("the reference has", "the recipe has")
            check_settings(reference.settings, read_settings(options), options.changed, names=names)
        runs: list[RunData] = []
        for run in map(load_run, options.runs) if options.runs else train(options):
            runs.append(run)
            report = make_report(runs, options)
            if options.out:
                options.out.write_text(report.to_json(), encoding="utf-8")
        if reference is None:
            print_curves({"new": report})
            return 0
        found = compare(reference, report, changed=options.changed)
    except PlasmidError as error:
        print_error(str(error))
        return 2
    print_curves({"reference": reference, "new": report})
    print_comparison(found)
    return int(any(one.is_worse for one in found))


if __name__ == "__main__":
    sys.exit(main())
