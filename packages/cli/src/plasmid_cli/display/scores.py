"""Output of `rl reward`: a row for each sample, and statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from plasmid.utils.printable import escape_unprintable
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .tables import FittingTable

BINS = 10
"""Number of bars of the histogram."""
BAR = 40
"""Length of the longest bar, in characters."""
TEXT = 48
"""Number of characters to show of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample."""

    id: str
    text: str
    reward: float | None
    """None if a reward raised."""
    before: float | None
    """Reward stored with the sample; None if there is none."""
    components: Mapping[str, float]
    error: str
    seconds: Mapping[str, float]
    """Seconds by reward; for samples that are scored together, those of the group."""


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Compute mean, standard deviation and range of the reward and each component, number of errors, and time."""
    scored = [row for row in rows if row.reward is not None]
    names = list(dict.fromkeys(name for row in scored for name in row.components))
    changed = [row for row in scored if row.before is not None and not math.isclose(row.before, row.reward or 0.0)]
    seconds = list(dict.fromkeys(name for row in scored for name in row.seconds))
    return {
        "samples": len(rows),
        "errors": sum(bool(row.error) for row in rows),
        "raised": len(rows) - len(scored),
        "changed": len(changed) if any(row.before is not None for row in rows) else None,
        "reward": _figures([row.reward for row in scored if row.reward is not None]),
        "components": {name: _figures([r.components[name] for r in scored if name in r.components]) for name in names},
        "seconds": {name: fmean(r.seconds[name] for r in scored if name in r.seconds) for name in seconds},
        "histogram": histogram([row.reward for row in scored if row.reward is not None]),
    }


def _figures(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"mean": fmean(values), "std": pstdev(values), "min": min(values), "max": max(values)}


def histogram(values: Sequence[float]) -> list[tuple[float, float, int]]:
    """Return lower bound, upper bound and count of each bin; one bin per value if there are few distinct values."""
    different = sorted(set(values))
    if len(different) <= BINS:
        return [(value, value, values.count(value)) for value in different]
    low, high = different[0], different[-1]
    width = (high - low) / BINS
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / width))] += 1
    return [(low + i * width, low + (i + 1) * width, count) for i, count in enumerate(counts)]


def render(rows: Sequence[Row], *, count: int) -> RenderableType:
    """Render the first ``count`` rows, the summary and the histogram."""
    found = summarize(rows)
    parts: list[RenderableType] = []
    if count:
        parts += [_rows(rows[:count], list(found["components"])), Text()]
    hidden = len(rows) - min(count, len(rows))
    more = f" ({hidden} not shown)" if hidden else ""
    raised = f", {found['raised']} of them because a reward raised" if found["raised"] else ""
    parts.append(Text(f"{len(rows)} samples{more}, {found['errors']} with an error{raised}", style="bold"))
    if found["changed"] is not None:
        parts.append(Text(f"{found['changed']} scored differently from the stored reward"))
    return Group(*parts, _summary(found), Text(), _histogram(found["histogram"]))


def _rows(rows: Sequence[Row], components: Sequence[str]) -> FittingTable:
    stored = any(row.before is not None for row in rows)
    columns = ("sample", "reward", *(["stored"] if stored else []), *components, "ms", "response", "error")
    cells = []
    for row in rows:
        numbers = [row.reward, *([row.before] if stored else []), *(row.components.get(name) for name in components)]
        style = "red" if row.reward is None else ""
        text = escape_unprintable(row.text).replace("\n", "\\n")
        shown = (
            row.id,
            *("" if number is None else f"{number + 0.0:.4g}" for number in numbers),
            f"{1000 * sum(row.seconds.values()):.1f}",
            text if len(text) <= TEXT else f"{text[: TEXT - 3]}...",
        )
        error = Text(escape_unprintable(row.error), style="red")
        cells.append((*(Text(cell, style=style) for cell in shown), error))
    return FittingTable(columns, cells, numbers=columns[1:-2], wraps_last=True)


def _summary(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", overflow="fold")
    for name in ("mean", "std", "min", "max", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, figures in {"reward": found["reward"], **found["components"]}.items():
        seconds = found["seconds"].get(name)
        time = "" if seconds is None else f"{1000 * seconds:.1f}"
        table.add_row(Text(name), *(f"{value + 0.0:.4g}" for value in figures.values() or [math.nan] * 4), time)
    return table


def _histogram(bins: Sequence[tuple[float, float, int]]) -> Text:
    most = max((count for _, _, count in bins), default=0)
    labels = [f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}" for low, high, _ in bins]
    width = max(map(len, labels), default=0)
    lines = []
    for label, (_, _, count) in zip(labels, bins, strict=True):
        bar = "#" * (math.ceil(BAR * count / most) if most else 0)
        lines.append(Text.assemble(f"{label:>{width}}  ", (f"{bar} ", "cyan"), str(count)))
    return Text("\n").join(lines)
