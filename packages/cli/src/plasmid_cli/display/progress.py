"""Shows a run while it goes on: a live display in a terminal, one line per batch elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from plasmid.config.run import RunConfig
from plasmid.plugins.hookspecs import hookimpl
from plasmid.types.batch import GroupRef
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .curves import sparkline

ROWS = 8
STARTING = "{}: starting; everything that the run writes goes there"
SAVING = "saving while the run goes on"
PHASES = {
    "start": "starting",
    "sample": "sampling",
    "score": "taking log-probabilities",
    "train": "training",
    "sync": "syncing weights",
    "save": "saving",
    "evaluate": "evaluating",
}


class ProgressObserver(AbstractContextManager["ProgressObserver"], Protocol):
    """Give it to `plasmid.train` as an observer, inside its own ``with``."""


def make_progress(config: RunConfig, console: Console) -> ProgressObserver:
    """What fits the console: a live display, or plain lines for pipes, files and dumb terminals."""
    state = RunState(config)
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveProgress(state, console) if live else PlainProgress(state, console)


@dataclass(slots=True)
class RunState:
    """Progress of the run so far. Guarded by its lock: observers and the display are different threads."""

    config: RunConfig
    batches: int = 0
    """Batches that the run is to train: fewer than the recipe says where the data end before."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    phase: str = "start"
    version: int = 0
    scored: int = 0
    rewards: list[float] = field(default_factory=list)
    recent: deque[tuple[int, Mapping[str, float]]] = field(default_factory=lambda: deque(maxlen=ROWS))
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=ROWS))
    held_out: dict[str, float] = field(default_factory=dict)
    held_out_at: dict[str, tuple[int, float]] = field(default_factory=dict)
    """First evaluation of each set: where the run started from."""
    last_end: float = field(default_factory=time.monotonic)
    saved_asynchronously: set[int] = field(default_factory=set)
    """Batches whose checkpoints are or were written while the run goes on."""

    def __post_init__(self) -> None:
        self.batches = self.batches or self.config.run.batches

    def begin_phase(self, batch: int, phase: str, version: int) -> None:
        with self.lock:
            if phase == "start":
                self.step = batch  # a resumed run does not begin at 0
            elif self.phase == "start":
                self.last_end = time.monotonic()
            self.phase, self.version = phase, version

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.lock:
            now = time.monotonic()
            self.durations.append(now - self.last_end)
            self.last_end, self.step, self.scored = now, step, 0
            self.recent.append((step, dict(metrics)))
            if "reward/mean" in metrics:
                self.rewards.append(metrics["reward/mean"])

    def end_evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> float | None:
        with self.lock:
            reward = metrics.get(f"eval/{name}/reward")
            if reward is not None:
                self.held_out[name] = reward
                self.held_out_at.setdefault(name, (step, reward))
            return reward

    def saved_message(self, step: int, path: Path, seconds: float) -> str:
        """Message for a complete checkpoint."""
        return f"saved {path}" + (f" in {seconds:.1f} s" if step in self.saved_asynchronously else "")

    def eta_s(self) -> float | None:
        """Seconds to the end, by the pace of the last batches; None before the first."""
        if not self.durations:
            return None
        pace = sum(self.durations) / len(self.durations)
        return max(0.0, pace * (self.batches - self.step) - (time.monotonic() - self.last_end))


class PlainProgress:
    """One line per batch, evaluation and checkpoint."""

    def __init__(self, state: RunState, console: Console) -> None:
        self._state, self._console = state, console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @hookimpl
    def run_started(self, run_dir: Path, batches: int) -> None:
        self._state.batches = batches
        self._print(STARTING.format(run_dir))

    @hookimpl
    def phase_started(self, batch: int, phase: str, version: int) -> None:
        self._state.begin_phase(batch, phase, version)

    @hookimpl
    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._state.end_step(step, metrics)
        parts = [f"batch {step}/{self._state.batches}", *(f"{name} {value}" for name, value in _columns(metrics))]
        eta = self._state.eta_s()
        self._print("  ".join([*parts, f"eta {duration(eta)}"] if eta is not None else parts))

    @hookimpl
    def evaluation_finished(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        if (reward := self._state.end_evaluation(step, name, metrics)) is not None:
            self._print(f"batch {step}/{self._state.batches}  held-out reward of {name}: {reward:.4g}")

    @hookimpl
    def checkpoint_begun(self, step: int) -> None:
        self._state.saved_asynchronously.add(step)
        self._print(f"batch {step}/{self._state.batches}  {SAVING}")

    @hookimpl
    def checkpoint_saved(self, step: int, path: Path, seconds: float) -> None:
        self._print(f"batch {step}/{self._state.batches}  {self._state.saved_message(step, path, seconds)}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveProgress:
    """A display that redraws itself at the bottom of the terminal; log lines scroll by above it."""

    def __init__(self, state: RunState, console: Console) -> None:
        self._state, self._console = state, console
        self._live = Live(self, console=console, refresh_per_second=4, transient=False)
        self._replaced: list[logging.Handler] = []
        self._handler = RichHandler(console=console, show_path=False, markup=False, rich_tracebacks=False)

    def __enter__(self) -> Self:
        root = logging.getLogger()
        # other handlers write to the terminal behind the display's back and would tear it
        self._replaced = [h for h in root.handlers if type(h) is logging.StreamHandler]
        for handler in self._replaced:
            root.removeHandler(handler)
        self._handler.setLevel(min((h.level for h in self._replaced), default=logging.NOTSET))
        root.addHandler(self._handler)
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        root = logging.getLogger()
        root.removeHandler(self._handler)
        for handler in self._replaced:
            root.addHandler(handler)

    @hookimpl
    def run_started(self, run_dir: Path, batches: int) -> None:
        self._state.batches = batches
        self._console.print(Text(STARTING.format(run_dir), style="dim"))

    @hookimpl
    def phase_started(self, batch: int, phase: str, version: int) -> None:
        self._state.begin_phase(batch, phase, version)

    @hookimpl
    def group_scored(self, group: GroupRef) -> None:
        with self._state.lock:
            self._state.scored += not group.dropped_by

    @hookimpl
    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._state.end_step(step, metrics)

    @hookimpl
    def evaluation_finished(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        self._state.end_evaluation(step, name, metrics)

    @hookimpl
    def checkpoint_begun(self, step: int) -> None:
        self._state.saved_asynchronously.add(step)
        self._console.print(Text(f"batch {step}: {SAVING}", style="dim"))

    @hookimpl
    def checkpoint_saved(self, step: int, path: Path, seconds: float) -> None:
        self._console.print(Text(self._state.saved_message(step, path, seconds), style="dim"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._state.lock:
            display = render(self._state, width=options.max_width)
        yield display  # past the lock: what draws it may wait for locks of the console


def render(state: RunState, *, width: int) -> RenderableType:
    """The whole display."""
    parts: list[RenderableType] = [_bar(state, width)]
    if state.recent:
        parts.append(_table(state))
    if len(state.rewards) > 1:
        line = sparkline(state.rewards, width=max(10, min(60, width - 30)))
        parts.append(
            Text.assemble(("reward ", "dim"), (line, "cyan"), f"  {state.rewards[0]:.3g} -> {state.rewards[-1]:.3g}")
        )
    for name, reward in state.held_out.items():
        step, first = state.held_out_at[name]
        change = f"  (batch {step}: {first:.3g})" if state.step > step else ""
        parts.append(Text.assemble(("held out ", "dim"), (f"{name} ", "yellow"), f"{reward:.3g}", (change, "dim")))
    return Group(*parts)


def duration(seconds: float) -> str:
    """``1:02:03`` or ``4:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar(state: RunState, width: int) -> RenderableType:
    eta = state.eta_s()
    phase = PHASES.get(state.phase, state.phase)
    if state.phase == "sample":
        phase += f" {min(state.scored, state.config.run.prompts_per_batch)}/{state.config.run.prompts_per_batch}"
    done = f"{state.step}/{state.batches}"
    clock = f"{duration(time.monotonic() - state.started)}  eta {duration(eta) if eta is not None else '-:--'}"
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=state.batches, completed=state.step, width=max(8, min(30, width - 55)))
    grid.add_row(
        Text(state.config.recipe, style="bold"), bar, done, Text(phase, style="green"), Text(clock, style="dim")
    )
    return grid


def _table(state: RunState) -> Table:
    names = list(dict.fromkeys(name for _, metrics in state.recent for name, _ in _columns(metrics)))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("batch", *names):
        table.add_column(name, justify="right", no_wrap=True)
    for step, metrics in state.recent:
        values = dict(_columns(metrics))
        table.add_row(str(step), *(values.get(name, "") for name in names), style="bold" if step == state.step else "")
    return table


def _columns(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    columns = (
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "train/loss", "{:.4f}"),
        ("kl", "train/kl", "{:.4f}"),
        ("length", "rollout/length_mean", "{:.0f}"),
        ("stale", "rollout/staleness_mean", "{:.1f}"),
        ("tok/s", "perf/tokens_per_s", "{:.0f}"),
        ("s", "perf/batch_s", "{:.1f}"),
    )
    return [(name, pattern.format(metrics[key])) for name, key, pattern in columns if key in metrics]
