"""Compare the plan of a run with its measurements."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .run_data import RunData

GIB = 2**30
PEAK = re.compile(r"memory/trainer-\d+/gpu_peak_train_gb")
PROCESS = re.compile(r"memory/trainer-\d+/rss_gb")
TIMES = {"sample": "sampling", "score": "scoring", "train": "training", "batch": "whole batch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A planned and measured quantity."""

    what: str
    planned: float
    measured: float
    unit: str

    @property
    def ratio(self) -> float:
        """Planned value divided by the measured one."""
        return self.planned / self.measured if self.measured else math.nan

    @property
    def text(self) -> str:
        """Return the row as one line of text."""
        return f"{self.planned:.3g} {self.unit} planned, {self.measured:.3g} measured ({self.ratio:.2f})"


def plan_rows(run: RunData) -> list[PlanRow]:
    """Return the maximum memory of a trainer rank and median times, if they were both planned and measured.

    Ignores the first batch, which includes compilation and warm-up, unless it is the only one.
    """
    return list(_rows(run))


def plan_table(rows: Sequence[PlanRow]) -> Table:
    """Create a table of planned and measured values and their ratios."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("plan and measurement", "plan", "measured", "plan / measured"):
        table.add_column(name, justify="left" if name.startswith("plan and") else "right")
    for row in rows:
        numbers = (f"{value:.3g} {row.unit}" for value in (row.planned, row.measured))
        table.add_row(Text(row.what), *numbers, f"{row.ratio:.2f}")
    return table


def _rows(run: RunData) -> Iterator[PlanRow]:
    entries = [entry.metrics for entry in run.metrics]
    entries = entries[1:] or entries
    pattern = PROCESS if run.plan.get("device") == "CPU" else PEAK
    peaks = [value * 1e9 / GIB for metrics in entries for name, value in metrics.items() if pattern.fullmatch(name)]
    planned = _number(run, "trainer_bytes")
    if peaks and planned is not None:
        what = "memory of a trainer rank" if pattern is PEAK else "memory of a trainer process"
        yield PlanRow(what=what, planned=planned / GIB, measured=max(peaks), unit="GiB")
    for phase, what in TIMES.items():
        seconds = [metrics[f"perf/{phase}_s"] for metrics in entries if f"perf/{phase}_s" in metrics]
        planned = _number(run, f"{phase}_s")
        if seconds and planned is not None:
            yield PlanRow(what=what, planned=planned, measured=median(seconds), unit="s")


def _number(run: RunData, name: str) -> float | None:
    value = run.plan.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < sys.float_info.max else None
