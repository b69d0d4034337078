"""Record metrics of a run in the journal and send them to observers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plasmid.utils.waits.ledger import LEDGER

from .dispatch import ObserverQueues
from .journal import Journal
from .system import SystemMonitor

log = logging.getLogger(__name__)
BEFORE_TRAINED = ("sample", "score", "train")
"""Phases before a batch counts as trained."""


class MetricsRecorder:
    """Writes metrics to the journal before notifying observers, and adds gauges of data and machine."""

    def __init__(
        self,
        *,
        path: Path,
        queues: ObserverQueues,
        monitor: SystemMonitor,
        data_metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        self.journal = Journal(path)
        self._queues, self._monitor, self._data_metrics = queues, monitor, data_metrics

    def begin_phase(self, phase: str, batch: int, version: int) -> None:
        """Notify observers of a phase, with the number of trained batches and the policy version."""
        batch += phase in BEFORE_TRAINED
        log.debug("batch %d: %s", batch, phase)
        LEDGER.begin_phase(f"batch {batch}, {phase}")
        self.emit("phase_started", batch=batch, phase=phase, version=version)

    def emit(self, hook: str, **kwargs: Any) -> None:
        """Notify observers, after writing the metrics of a finished batch to the journal. Never blocks."""
        if hook == "batch_finished":
            kwargs["metrics"] = {**kwargs["metrics"], **self._data_metrics(), **self._monitor.metrics()}
            self.journal.append(kwargs["batch"], metrics=kwargs["metrics"])
        self._queues.emit(hook, **kwargs)
