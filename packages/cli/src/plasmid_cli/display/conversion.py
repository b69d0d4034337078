"""Progress of `rl convert`: a bar in a terminal, otherwise lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plasmid_runtime.observe.progress import duration
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from ..output import error_console

LINE_EVERY_S = 10.0
"""Interval of lines, in seconds."""


class ConversionProgress:
    """Counts converted bytes. Implements `plasmid_convert.Progress`."""

    def __init__(self, show: Callable[[int | None, int, str], None], print_line: Callable[[str], None]) -> None:
        """``show`` gets the total, the converted bytes and their description whenever they change."""
        self._show, self._print = show, print_line
        self._total: int | None = None
        self._kept = self._done = 0
        self._began = time.monotonic()

    def start(self, num_bytes: int | None, kept: int) -> None:
        """Begin; ``kept`` bytes were converted before."""
        self._total, self._kept, self._done, self._began = num_bytes, kept, kept, time.monotonic()
        if kept and num_bytes:
            self._print(
                f"continuing an interrupted conversion: {kept / 1e9:.2f} of {num_bytes / 1e9:.2f} GB are finished"
            )

    def advance(self, name: str, num_bytes: int) -> None:
        """Count a tensor."""
        self._done += num_bytes
        self._show(self._total, self._done, self.describe(time.monotonic() - self._began))

    def describe(self, seconds: float) -> str:
        """Return converted bytes, percentage, speed and remaining time, ``seconds`` after the start."""
        speed = (self._done - self._kept) / max(seconds, 1e-6)
        if self._total is None:
            return f"{self._done / 1e9:.2f} GB  {speed / 1e9:.2f} GB/s"
        share = 100 * self._done / max(self._total, 1)
        eta = duration((self._total - self._done) / speed) if speed else "-:--"
        return f"{self._done / 1e9:.2f}/{self._total / 1e9:.2f} GB  {share:.0f}%  {speed / 1e9:.2f} GB/s  eta {eta}"


@contextmanager
def conversion_progress() -> Iterator[ConversionProgress]:
    """Show the progress on standard error."""
    console = error_console()

    def print_line(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    if not console.is_terminal:
        last = time.monotonic()

        def show(total: int | None, done: int, text: str) -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_EVERY_S:
                last = time.monotonic()
                print_line(text)

        yield ConversionProgress(show, print_line)
        return
    columns = (BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield ConversionProgress(
            lambda total, done, text: bar.update(task, total=total, completed=done, description=text), print_line
        )
