"""Metrics of a run on their way to the journal and to observers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plasmid.components import PromptStream

from .dispatch import ObserverQueues
from .journal import Journal
from .system import SystemMonitor


class MetricsRecorder:
    """Writes metrics to the run's journal before any observer hears of them, and adds gauges of data and machine."""

    def __init__(self, *, path: Path, queues: ObserverQueues, monitor: SystemMonitor, data: PromptStream) -> None:
        self.journal = Journal(path)
        self._queues, self._monitor, self._data = queues, monitor, data

    def emit(self, hook: str, **kwargs: Any) -> None:
        """Tell every observer, after the journal has the metrics of a finished step. Never blocks."""
        if hook == "step_finished":
            kwargs["metrics"] = {**kwargs["metrics"], **self._data.metrics(), **self._monitor.metrics()}
            self.journal.append(kwargs["step"], metrics=kwargs["metrics"])
        self._queues.emit(hook, **kwargs)
