"""Summary of a run from the files in its folder: a table, the reward curve, and a list of files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid_runtime.observe.progress import duration
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..display.curves import Series, chart, write_png
from .plan_rows import plan_rows, plan_table
from .run_data import RunData, load_run

if TYPE_CHECKING:
    from plasmid.types.runs import RunResult

DESCRIPTIONS = (
    ("final", "final policy, a Hugging Face folder"),
    ("checkpoints", "checkpoints to resume from"),
    ("reward.png", "reward curve"),
    ("report.html", "report for the browser"),
    ("metrics.jsonl", "metrics of every batch"),
    ("plan.json", "plan, updated with the lengths measured in the first batch"),
    ("evaluations.jsonl", "metrics of every evaluation"),
    ("samples", "every sample, as Parquet"),
    ("tensorboard", "event files for TensorBoard"),
    ("wandb", "Weights & Biases files"),
    ("mlflow.db", "MLflow database"),
    ("logs", "logs of all processes"),
)
"""Files and folders of a run with descriptions, in the order of the summary."""


def print_summary(result: RunResult, console: Console) -> None:
    """Print the summary at the end of ``rl train``, and write ``reward.png``."""
    run = load_run(result.run_dir)
    state = "stopped" if result.interrupted else "finished"
    print_run(run, console, title=f"{state} {run.name} after {result.steps} batches in {duration(result.seconds)}")


def print_run(run: RunData, console: Console, *, title: str | None = None) -> None:
    """Print table, curve and paths of a run; writes ``reward.png`` into its folder if it has rewards."""
    series = reward_series(run)
    if any(len(one.points()) > 1 for one in series):
        write_png(run.path / "reward.png", series, title=f"{run.name}: mean reward")
    console.print()
    console.print(Text(title or f"{run.name}, {len(run.metrics)} batches", style="bold"))
    console.print(key_figures(run))
    if rows := plan_rows(run):
        console.print()
        console.print(plan_table(rows))
    if series:
        console.print()
        console.print(chart(series, width=min(console.width, 100)), soft_wrap=True, highlight=False)
    console.print()
    console.print(path_lines(run.path), soft_wrap=True, highlight=False)  # keep paths on one line to copy them


def reward_series(run: RunData) -> list[Series]:
    """Return the training reward, then the reward of each evaluation set."""
    train = Series(name="train", x=run.curve("reward/mean")[0], y=run.curve("reward/mean")[1])
    sets = [(name, run.evaluation_curve(name)) for name in run.evaluations]
    held_out = [Series(name=f"evaluation: {name}", x=x, y=y, marked=True) for name, (x, y) in sets]
    return [s for s in (train, *held_out) if s.points()]


def key_figures(run: RunData) -> Table:
    """Create a table of the evaluation and training rewards at start and end, and of costs."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", overflow="fold")
    for name in ("start", "end", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in run.evaluations:
        metrics = dict.fromkeys(key.removeprefix(f"eval/{name}/") for e in run.evaluations[name] for key in e.metrics)
        for metric in (m for m in metrics if m == "reward" or m.startswith("pass@")):
            label = f"evaluation {name}: {metric}"
            table.add_row(Text(label, style="yellow"), *_change(run.evaluation_curve(name, metric)[1]))
    rewards = run.curve("reward/mean")[1]
    if rewards:
        n = min(5, max(1, len(rewards) // 4))
        of = f" (mean of {n} batches)" if n > 1 else ""
        table.add_row(
            Text(f"train reward{of}", style="cyan"), *_change([_mean(rewards[:n]), _mean(rewards[-n:])][: len(rewards)])
        )
    lengths = run.curve("rollout/length_mean")[1]
    if lengths:
        table.add_row("tokens per completion", *_change(lengths, pattern="{:.1f}"))
    for label, value in cost_rows(run):
        table.add_row(label, "", value, "")
    return table


def cost_rows(run: RunData) -> list[tuple[str, str]]:
    """Return batches, steps, time, speed and memory, if recorded."""
    rows = [("batches trained", str(run.metrics[-1].step))] if run.metrics else []
    if steps := run.curve("train/step")[1]:
        rows.append(("optimizer steps", f"{steps[-1]:.0f}"))
    seconds = run.curve("perf/batch_s")[1]
    if seconds:
        rows.append(("time in batches", duration(sum(seconds))))
    rates = [
        (m["perf/tokens_per_s"], m.get("perf/batch_s", 1.0))
        for e in run.metrics
        if "perf/tokens_per_s" in (m := e.metrics)
    ]
    if total := sum(s for _, s in rates):
        rows.append(("tokens per second", f"{sum(rate * s for rate, s in rates) / total:,.0f}"))
    if peak := max(run.curve("memory/rss_peak_gib")[1] or run.curve("memory/rss_gib")[1], default=0.0):
        placement = run.config.get("placement", {})
        joined = placement.get("address", "auto") != "auto" or placement.get("nodes", 1) > 1
        rows.append((f"peak memory, {'driver only' if joined else 'all processes'}", f"{peak:.2f} GiB"))
    return rows


def path_lines(run_dir: Path) -> Text:
    """List the files and folders of a run with descriptions, one per line."""
    found = [(run_dir / name, what) for name, what in DESCRIPTIONS if (run_dir / name).exists()]
    shown = [(str(path), what) for path, what in found if not _is_empty(path)]
    width = max((len(path) for path, _ in shown), default=0)
    return Text("\n").join(Text.assemble(f"{path:<{width}}  ", (what, "dim")) for path, what in shown)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _change(values: Sequence[float], *, pattern: str = "{:.4f}") -> Iterable[str]:
    if not values:
        return "", "", ""
    first, last = values[0], values[-1]
    if len(values) == 1:
        return pattern.format(first), "", ""
    return pattern.format(first), pattern.format(last), pattern.replace(":", ":+").format(last - first)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
