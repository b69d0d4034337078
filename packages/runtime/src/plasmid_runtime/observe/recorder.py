"""Metrics of a run on their way to the journal and to observers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from plasmid.components import PromptStream

from .dispatch import ObserverQueues
from .journal import Journal
from .system import SystemMonitor

log = logging.getLogger(__name__)
BEFORE_TRAINED = ("sample", "score", "train")
"""Phases of a batch that is not counted as trained yet."""


class MetricsRecorder:
    """Writes metrics to the run's journal before any observer hears of them, and adds gauges of data and machine."""

    def __init__(self, *, path: Path, queues: ObserverQueues, monitor: SystemMonitor, data: PromptStream) -> None:
        self.journal = Journal(path)
        self._queues, self._monitor, self._data = queues, monitor, data

    def begin_phase(self, phase: str, batch: int, version: int) -> None:
        """Tell every observer that a phase begins after this many trained batches, at this policy version."""
        batch += phase in BEFORE_TRAINED
        log.debug("batch %d: %s", batch, phase)
        self.emit("phase_started", batch=batch, phase=phase, version=version)

    def emit(self, hook: str, **kwargs: Any) -> None:
        """Tell every observer, after the journal has the metrics of a finished step. Never blocks."""
        if hook == "step_finished":
            kwargs["metrics"] = {**kwargs["metrics"], **self._data.metrics(), **self._monitor.metrics()}
            self.journal.append(kwargs["step"], metrics=kwargs["metrics"])
        self._queues.emit(hook, **kwargs)
