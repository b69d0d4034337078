"""Progress of a run as lines of text: one per batch, evaluation and checkpoint."""

from __future__ import annotations

import io
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from plasmid.config.run import RunConfig
from plasmid.plugins.hookspecs import hookimpl
from plasmid.types.batch import GroupRef
from plasmid.utils.printable import escape_unprintable

CHECKS, SYNC, SAMPLES = "checks", "weights to the engine", "first samples"
"""Parts of the start-up in which the driver waits for no process: before it starts any, and after all have started."""
EARLY_S = 0.1
"""Maximum wait for a Ray that has started during the checks, in seconds; the checks then include its start."""
PARTS = {"ray": "Ray", "rollout-worker": "rollout workers"}
"""Names shown for parts of a run; other parts are shown by their own names."""


@dataclass(slots=True)
class StartProgress:
    """Progress of the start-up of a run, from the command to the first sample."""

    began: float
    """Time of the command (`time.monotonic`)."""
    waits: Mapping[str, str] = field(default_factory=dict)
    """Stage of each process that is not ready."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time that the start-up has waited for each part."""
    marks: dict[str, float] = field(default_factory=dict)
    """Start time of each phase, and under `CHECKS` the time when the first process was started."""
    is_over: bool = False

    def advance(self, waits: Mapping[str, str], seconds: Mapping[str, float]) -> str:
        """Store the current waits, and return them as a line of text; empty if there are none."""
        self.marks.setdefault(CHECKS, time.monotonic())
        self.waits, self.seconds = waits, seconds
        return f"{time.monotonic() - self.began:.0f} s: waiting for {self.describe()}" if waits else ""

    def begin_phase(self, phase: str) -> None:
        """Record the start time of a phase, unless a phase of this name has been recorded before."""
        if phase != "start":
            self.marks.setdefault(phase, time.monotonic())

    def describe(self) -> str:
        """Return the processes that are not ready, grouped by stage."""
        stages: dict[str, list[str]] = {}
        for process, stage in self.waits.items():
            stages.setdefault(stage, []).append(PARTS.get(process, process))
        return "; ".join(f"{', '.join(names)} ({stage})" for stage, names in stages.items())

    def finish(self) -> str:
        """Mark the start-up as complete when the first sample arrives, and return its breakdown as a line of text."""
        self.is_over = True
        now = time.monotonic()
        seconds = dict(self.seconds)
        ray, checks = seconds.pop("ray", None), self.marks.get(CHECKS, now) - self.began
        if ray is None or ray > EARLY_S:
            first = [(CHECKS, checks), *([(PARTS["ray"], ray)] if ray is not None else [])]
        else:
            first = [(f"{CHECKS} and {PARTS['ray']}", checks + ray)]
        parallel = [(PARTS.get(name, name), spent) for name, spent in seconds.items()]
        sync = self.marks.get("sync", now)
        ready = min((at for name, at in self.marks.items() if name not in (CHECKS, "sync")), default=now)
        last = [(SYNC, max(0.0, ready - sync)), (SAMPLES, now - ready)]
        text = [*map(_show, first)]
        text += [" | ".join(map(_show, parallel)) + " (in parallel)"] if parallel else []
        return f"started in {now - self.began:.0f} s: {', '.join([*text, *map(_show, last)])}"


def _show(part: tuple[str, float]) -> str:
    name, seconds = part
    return f"{name} {seconds:.0f}"


ROWS = 8
"""Number of recent batches whose metrics and durations are stored."""
STARTING = "{}: starting; all output of the run is written there"
SAVING = "saving in the background"


@dataclass(slots=True)
class RunState:
    """Progress of a run so far. Protected by its lock, since observers and display run in different threads."""

    config: RunConfig
    batches: int = 0
    """Total number of batches: `run.batches`, or fewer if the data ends earlier."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    started: float = field(default_factory=time.monotonic)
    batch: int = 0
    phase: str = "start"
    version: int = 0
    scored: int = 0
    rewards: list[float] = field(default_factory=list)
    recent: deque[tuple[int, Mapping[str, float]]] = field(default_factory=lambda: deque(maxlen=ROWS))
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=ROWS))
    eval_rewards: dict[str, float] = field(default_factory=dict)
    """Reward of the last evaluation of each set."""
    first_evals: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Batch and reward of the first evaluation of each set."""
    last_end: float = field(default_factory=time.monotonic)
    saved_asynchronously: set[int] = field(default_factory=set)
    """Batches whose checkpoints are or were written in the background."""
    start: StartProgress = field(init=False)

    def __post_init__(self) -> None:
        self.start = StartProgress(self.started)
        self.batches = self.batches or self.config.run.batches

    def begin_phase(self, batch: int, phase: str, version: int) -> None:
        with self.lock:
            if phase == "start":
                self.batch = batch  # a resumed run does not start at 0
            elif self.phase == "start":
                self.last_end = time.monotonic()
            self.phase, self.version = phase, version
            self.start.begin_phase(phase)

    def end_batch(self, batch: int, metrics: Mapping[str, float]) -> None:
        with self.lock:
            now = time.monotonic()
            self.durations.append(now - self.last_end)
            self.last_end, self.batch, self.scored = now, batch, 0
            self.recent.append((batch, dict(metrics)))
            if "reward/mean" in metrics:
                self.rewards.append(metrics["reward/mean"])

    def end_evaluation(self, batch: int, name: str, metrics: Mapping[str, float]) -> None:
        with self.lock:
            reward = metrics.get(f"eval/{name}/reward")
            if reward is not None:
                self.eval_rewards[name] = reward
                self.first_evals.setdefault(name, (batch, reward))

    def eta_s(self) -> float | None:
        """Return the estimated time to the end, in seconds, from recent batches; None before the first."""
        if not self.durations:
            return None
        pace = sum(self.durations) / len(self.durations)
        return max(0.0, pace * (self.batches - self.batch) - (time.monotonic() - self.last_end))


class ProgressObserver(AbstractContextManager["ProgressObserver"]):
    """Observer that reports progress. Enter its ``with`` block, and pass it to `plasmid.train`."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    @abstractmethod
    def print_line(self, line: str) -> None:
        """Print a line."""

    def __exit__(self, *error: object) -> None:
        return None

    @hookimpl
    def run_started(self, run_dir: Path, batches: int) -> None:
        self._state.batches = batches
        self.print_line(STARTING.format(run_dir))

    @hookimpl
    def start_advanced(self, waits: Mapping[str, str], seconds: Mapping[str, float]) -> None:
        with self._state.lock:
            line = self._state.start.advance(waits, seconds)
        self.print_waits(line)

    def print_waits(self, line: str) -> None:
        """Print the waits of the start-up. Overridden by displays that show them in a different way."""
        if line:
            self.print_line(line)

    @hookimpl
    def phase_started(self, batch: int, phase: str, version: int) -> None:
        self._state.begin_phase(batch, phase, version)

    @hookimpl
    def group_scored(self, group: GroupRef) -> None:
        with self._state.lock:
            self._state.scored += not group.dropped_by
        self._finish_start()

    @hookimpl
    def evaluation_advanced(self, done: int) -> None:
        if done:
            self._finish_start()

    def _finish_start(self) -> None:
        start = self._state.start
        if start.seconds and not start.is_over:
            self.print_line(start.finish())

    @hookimpl
    def batch_finished(self, batch: int, metrics: Mapping[str, float]) -> None:
        self._state.end_batch(batch, metrics)

    @hookimpl
    def evaluation_finished(self, batch: int, name: str, metrics: Mapping[str, float]) -> None:
        self._state.end_evaluation(batch, name, metrics)

    @hookimpl
    def checkpoint_started(self, batch: int) -> None:
        self._state.saved_asynchronously.add(batch)
        self._print_event(batch, SAVING)

    @hookimpl
    def checkpoint_saved(self, batch: int, path: Path, seconds: float) -> None:
        took = f" in {seconds:.1f} s" if batch in self._state.saved_asynchronously else ""
        self._print_event(batch, f"saved {path}{took}")

    def _print_event(self, batch: int, text: str) -> None:
        self.print_line(f"batch {batch}/{self._state.batches}  {text}")


class LineProgress(ProgressObserver):
    """Prints one line per batch, evaluation and checkpoint."""

    @hookimpl
    def batch_finished(self, batch: int, metrics: Mapping[str, float]) -> None:
        super().batch_finished(batch, metrics)
        parts = [f"batch {batch}/{self._state.batches}", *(f"{name} {value}" for name, value in columns(metrics))]
        eta = self._state.eta_s()
        self.print_line("  ".join([*parts, f"eta {duration(eta)}"] if eta is not None else parts))

    @hookimpl
    def evaluation_finished(self, batch: int, name: str, metrics: Mapping[str, float]) -> None:
        super().evaluation_finished(batch, name, metrics)
        if (reward := metrics.get(f"eval/{name}/reward")) is not None:
            self._print_event(batch, f"evaluation {name}: reward {reward:.4g}")


class StreamProgress(LineProgress):
    """Prints to a text stream, for programs that call `plasmid.train` or `plasmid.open`."""

    def __init__(self, state: RunState, stream: TextIO | io.TextIOBase | None = None) -> None:
        """``stream``: None for standard error."""
        super().__init__(state)
        self._stream = stream

    def print_line(self, line: str) -> None:
        stream = self._stream or sys.stderr
        stream.write(escape_unprintable(line) + "\n")
        stream.flush()


def duration(seconds: float) -> str:
    """Format a duration as ``1:02:03`` or ``4:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def columns(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return names and values of the metrics to print for a batch."""
    shown = (
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "train/loss", "{:.4f}"),
        ("kl", "train/kl", "{:.4f}"),
        ("length", "rollout/length_mean", "{:.0f}"),
        ("stale", "rollout/staleness_mean", "{:.1f}"),
        ("tok/s", "perf/tokens_per_s", "{:.0f}"),
        ("s", "perf/batch_s", "{:.1f}"),
    )
    return [(name, pattern.format(metrics[key])) for name, key, pattern in shown if key in metrics]
