"""Progress of a run: a live display in a terminal, otherwise one line per batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from plasmid.config.run import RunConfig
from plasmid.plugins.hookspecs import hookimpl
from plasmid_runtime.observe.progress import LineProgress, ProgressObserver, RunState, columns, duration
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .curves import sparkline

PHASES = {
    "start": "starting",
    "sample": "sampling",
    "score": "computing log-probabilities",
    "train": "training",
    "sync": "syncing weights",
    "save": "saving",
    "export": "exporting",
    "evaluate": "evaluating",
    "paused": "paused",
}
MIN_BAR = 8
"""Minimum width of the progress bar, in characters; it is omitted if there is less space."""


def make_progress(config: RunConfig, console: Console, state: RunState | None = None) -> ProgressObserver:
    """Create a live display, or plain lines for pipes, files and dumb terminals."""
    state = state or RunState(config)
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveProgress(state, console) if live else PlainProgress(state, console)


def make_log_progress(config: RunConfig, console: Console, log: Console) -> list[LogProgress]:
    """Create observers that write to ``log`` the lines that a live display on ``console`` does not print."""
    live = console.is_terminal and not console.is_dumb_terminal
    return [LogProgress(RunState(config), log)] if live else []


class PlainProgress(LineProgress):
    """Prints one line per batch, evaluation and checkpoint to a console."""

    def __init__(self, state: RunState, console: Console) -> None:
        super().__init__(state)
        self._console = console

    def print_line(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class LogProgress(PlainProgress):
    """Writes all lines of batches and evaluations to a log, since a live display only shows the last ones."""

    @hookimpl
    def run_started(self, run_dir: Path, batches: int) -> None:
        self._state.batches = batches

    @hookimpl
    def start_advanced(self, waits: Mapping[str, str], seconds: Mapping[str, float]) -> None:
        return None

    @hookimpl
    def checkpoint_started(self, batch: int) -> None:
        return None

    @hookimpl
    def checkpoint_saved(self, batch: int, path: Path, seconds: float) -> None:
        return None


class LiveProgress(ProgressObserver):
    """A live display at the bottom of the terminal, with log lines above it."""

    def __init__(self, state: RunState, console: Console) -> None:
        super().__init__(state)
        self._console = console
        self._live = Live(self, console=console, refresh_per_second=4, transient=False)
        self._replaced: list[logging.Handler] = []
        self._handler = RichHandler(console=console, show_path=False, markup=False, rich_tracebacks=False)

    def __enter__(self) -> Self:
        root = logging.getLogger()
        # handlers that write to the terminal directly would break the display
        self._replaced = [h for h in root.handlers if type(h) is logging.StreamHandler]
        for handler in self._replaced:
            root.removeHandler(handler)
        self._handler.setLevel(min((h.level for h in self._replaced), default=logging.NOTSET))
        root.addHandler(self._handler)
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        root = logging.getLogger()
        root.removeHandler(self._handler)
        for handler in self._replaced:
            root.addHandler(handler)

    def print_waits(self, line: str) -> None:
        return None

    def _print_event(self, batch: int, text: str) -> None:
        self.print_line(f"batch {batch}: {text}")

    def print_line(self, line: str) -> None:
        self._console.print(Text(line, style="dim"), soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._state.lock:
            display = render(self._state, width=options.max_width)
        yield display  # outside of the lock, since rendering may wait for locks of the console


def render(state: RunState, *, width: int) -> RenderableType:
    """Render the display."""
    parts: list[RenderableType] = [_bar(state, width)]
    if state.phase == "start" and state.start.waits:
        parts.append(Text(f"waiting for {state.start.describe()}", style="yellow", overflow="ellipsis", no_wrap=True))
    if state.recent:
        parts.append(_table(state))
    if len(state.rewards) > 1:
        line = sparkline(state.rewards, width=max(10, min(60, width - 30)))
        parts.append(
            Text.assemble(("reward ", "dim"), (line, "cyan"), f"  {state.rewards[0]:.3g} -> {state.rewards[-1]:.3g}")
        )
    for name, reward in state.eval_rewards.items():
        batch, first = state.first_evals[name]
        change = f"  (batch {batch}: {first:.3g})" if state.batch > batch else ""
        parts.append(Text.assemble(("evaluation ", "dim"), (f"{name} ", "yellow"), f"{reward:.3g}", (change, "dim")))
    return Group(*parts)


def _bar(state: RunState, width: int) -> RenderableType:
    eta = state.eta_s()
    phase = PHASES.get(state.phase, state.phase)
    if state.phase == "sample":
        phase += f" {min(state.scored, state.config.run.prompts_per_batch)}/{state.config.run.prompts_per_batch}"
    done = f"{state.batch}/{state.batches}"
    clock = f"{duration(time.monotonic() - state.started)}  eta {duration(eta) if eta is not None else '-:--'}"
    grid = Table.grid(padding=(0, 1))
    room = width - sum(len(part) + 1 for part in (state.config.recipe, done, phase, clock))
    cells: list[RenderableType] = [Text(state.config.recipe, style="bold")]
    if room >= MIN_BAR:
        cells.append(ProgressBar(total=state.batches, completed=state.batch, width=min(30, room)))
    grid.add_row(*cells, done, Text(phase, style="green"), Text(clock, style="dim"))
    return grid


def _table(state: RunState) -> Table:
    names = list(dict.fromkeys(name for _, metrics in state.recent for name, _ in columns(metrics)))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("batch", *names):
        table.add_column(name, justify="right", no_wrap=True)
    for number, metrics in state.recent:
        values = dict(columns(metrics))
        style = "bold" if number == state.batch else ""
        table.add_row(str(number), *(values.get(name, "") for name in names), style=style)
    return table
