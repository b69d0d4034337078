"""Tables of evaluation results, and progress bars during evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from plasmid.plugins.hookspecs import hookimpl
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..output import error_console
from .tables import FittingTable

Z = 1.96
"""Half-width of a 95 % confidence interval, in standard errors."""
LAST = ("length_mean", "truncated", "failed", "prompts", "version_min", "version_max")
"""Metrics of the last columns, in this order."""


def evaluation_table(found: Mapping[str, Mapping[str, float]]) -> FittingTable:
    """Create a table with one row per set, per value that its results are split by, and for the mean over sets."""
    rows = dict(_rows(found))
    named = dict.fromkeys(name for row in rows.values() for name in row if not name.startswith("stderr/"))
    first = [name for name in named if name == "reward" or name.startswith("pass@")]
    columns = [*first, *(n for n in named if n not in (*first, *LAST)), *(n for n in LAST if n in named)]
    cells: list[tuple[str | Text, ...]] = [
        (Text(label), *(_cell(row, name) for name in columns)) for label, row in rows.items()
    ]
    titles = [name.replace("_", " ") for name in columns]
    return FittingTable(("set", *titles), cells, numbers=titles)


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
    """Observer that updates one progress bar per set."""

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
    """Provide observers that show progress on standard error; none if it is not a terminal."""
    with open_progress() as progress:
        yield [ProgressBars(progress)] if progress.console.is_terminal else []


def open_progress() -> Progress:
    """Create progress bars on standard error, which are hidden if it is not a terminal. Use it as a context manager."""
    console = error_console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def count_failed(found: Mapping[str, Mapping[str, float]]) -> int:
    """Return the number of failed rollouts in all sets."""
    return round(sum(metrics.get(f"eval/{name}/failed", 0.0) for name, metrics in found.items()))
