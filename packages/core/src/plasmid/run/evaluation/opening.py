"""Opens the evaluator of a run: who samples, what it writes, and what a resumed run knows already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...config import RunConfig
from ...observe.dispatch import ObserverQueues
from ...observe.journal import Journal, read_journal
from ..checkpoint.run_folder import RunFolder
from ..lifecycle.assembly import Restored
from ..lifecycle.exit_stack import Closing
from ..lifecycle.startup import Parts
from .evaluator import Bench, Due, EvaluationSet, Evaluator


class EvaluationJournal:
    """Writes results to ``evaluations.jsonl`` before any observer hears of them."""

    def __init__(self, folder: RunFolder, queues: ObserverQueues) -> None:
        self.journal = Journal(folder.evaluations)
        self._queues = queues

    def advanced(self, batch: int, name: str, done: int, total: int) -> None:
        """Implements `evaluation.Telling`."""
        self._queues.emit("evaluation_advanced", step=batch, name=name, done=done, total=total)

    def finished(self, batch: int, name: str, metrics: Mapping[str, float]) -> None:
        """Implements `evaluation.Telling`."""
        self.journal.append(batch, metrics=metrics, name=name)
        self._queues.emit("evaluation_finished", step=batch, name=name, metrics=metrics)


def open_evaluator(
    config: RunConfig,
    parts: Parts,
    folder: RunFolder,
    sets: Sequence[EvaluationSet],
    queues: ObserverQueues,
    stack: Closing,
    *,
    state: Restored | None = None,
    training: bool = True,
) -> Evaluator | None:
    """What evaluates the sets and writes their journal; None where nothing can be sampled."""
    if parts.workers is None or parts.engine is None:
        return None
    telling = EvaluationJournal(folder, queues)
    stack.later("the journal of evaluations", telling.journal.close)
    own = None
    if parts.eval_workers is not None and parts.eval_engine is not None:
        own = Bench(workers=parts.eval_workers, engine=parts.eval_engine)
    evaluator = Evaluator(
        config,
        sets,
        shared=Bench(workers=parts.workers, engine=parts.engine),
        own=own,
        samples_dir=folder.samples,
        telling=telling,
        known=_known(folder, state) if state is not None else {},
        pending=[(str(name), int(batch)) for name, batch in state.state.evaluations] if state is not None else (),
        training=training and parts.trainer is not None,
    )
    stack.later("evaluations", evaluator.close)
    return evaluator


def _known(folder: RunFolder, restored: Restored) -> dict[Due, Mapping[str, float]]:
    """Evaluations that were made up to the checkpoint: a run stopped before its first batch has made those of 0."""
    entries = read_journal(folder.evaluations)
    return {(entry.name, entry.step): entry.metrics for entry in entries if entry.step <= restored.state.batch}
