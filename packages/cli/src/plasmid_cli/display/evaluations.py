"""Results of evaluation sets as a table, and what is shown while they are evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from plasmid.plugins.hookspecs import hookimpl
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..output import error_console

Z = 1.96
"""Standard errors to either side of a mean that hold the true one with 95 %."""
LAST = ("length_mean", "truncated", "failed", "prompts", "version_min", "version_max")
"""Metrics that stand behind rewards, in this order."""


def evaluation_table(found: Mapping[str, Mapping[str, float]]) -> Table:
    """One row for each set, for each value that its results are split by, and for the mean over sets."""
    rows = dict(_rows(found))
    named = dict.fromkeys(name for row in rows.values() for name in row if not name.startswith("stderr/"))
    first = [name for name in named if name == "reward" or name.startswith("pass@")]
    columns = [*first, *(n for n in named if n not in (*first, *LAST)), *(n for n in LAST if n in named)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("set", no_wrap=True)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for label, row in rows.items():
        table.add_row(Text(label), *(_cell(row, name) for name in columns))
    return table


def _rows(found: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, dict[str, float]]]:
    for set_, metrics in found.items():
        own: dict[str, float] = {}
        split: dict[str, dict[str, float]] = {}
        for key, value in metrics.items():
            name = key.removeprefix(f"eval/{set_}/")
            part, slash, rest = name.partition("/")
            if slash and "=" in part:
                split.setdefault(part, {})[rest] = value
            else:
                own[name] = value
        yield set_, own
        for part, values in split.items():
            yield f"  {set_}, {part}", values


def _cell(row: Mapping[str, float], name: str) -> str:
    if name not in row:
        return ""
    spread = row.get(f"stderr/{name}")
    return f"{row[name]:.4g}" if spread is None else f"{row[name]:.4f} +- {Z * spread:.4f}"


class ProgressBars:
    """An observer that moves one bar for each set."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    @hookimpl
    def evaluation_advanced(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done)


@contextmanager
def progress_bars() -> Iterator[list[object]]:
    """Observers that show progress on standard error; none where that is no terminal."""
    console = error_console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield [ProgressBars(progress)] if console.is_terminal else []


def num_failed(found: Mapping[str, Mapping[str, float]]) -> int:
    """Rollouts that failed, in all sets."""
    return round(sum(metrics.get(f"eval/{name}/failed", 0.0) for name, metrics in found.items()))
