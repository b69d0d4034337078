"""The Python API. The `rl` command is a thin wrapper around these functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, Self

from .config.run import RunConfig
from .errors import PluginError
from .types.batch import GroupRef
from .types.runs import Mode, Resume, RunResult


class Session(Protocol):
    """A started run, created by `plasmid.open`. Use it in a ``with`` block.

    Four blocking calls train one batch, in this order: `sample`, `score`, `train`, `publish`. If the block ends without
    an exception, the last checkpoint and the exported policy are written, as the recipe configures them.
    """

    config: RunConfig
    """The recipe. `run.batches` is reduced if the data ends earlier."""
    run_dir: Path

    @property
    def batch(self) -> int:
        """Number of batches trained so far, including those before a resume."""

    @property
    def version(self) -> int:
        """Policy version of the engine: number of weight publications since version 0."""

    def sample(self) -> tuple[GroupRef, ...]:
        """Roll out, score and filter `run.prompts_per_batch` prompts.

        Returns nothing once `run.batches` batches are trained or the data has ended. `GroupRef.whole` has the texts:
        ``group.whole.get().samples[0].text``.
        """

    def score(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        """Compute the log-probabilities and values that the algorithm needs for these groups. Returns metrics.

        ``groups`` are all or some groups of the last `sample`. You can change their ``rewards`` and ``components`` with
        `dataclasses.replace`.
        """

    def train(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        """Take the optimizer steps for the groups that were scored last. Returns metrics."""

    def publish(self) -> Mapping[str, float]:
        """Send the weights to the engine. Returns all metrics of the batch.

        Also runs the evaluations and writes the checkpoint that are due after this batch. Must be called at least every
        `run.sync_every` batches, before the next `sample`.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


def train(
    config: RunConfig,
    *,
    resume: Resume = False,
    replay: Path | None = None,
    rollouts_only: bool = False,
    observers: Sequence[object] = (),
    progress: bool = True,
) -> RunResult:
    """Run a recipe to its end and return the results.

    With ``progress``, prints one line per batch, evaluation and checkpoint to stderr. With ``resume``, continues from
    the newest checkpoint; ``resume="auto"`` starts a new run if there is none. Uses the Ray cluster that this
    process is connected to or the recipe names, or starts its own. Raises `PluginError` if no runtime is installed.
    """
    mode = Mode(resume=resume, replay=replay, rollouts_only=rollouts_only)
    result: RunResult = _runtime().run(config, mode=mode, observers=observers, progress=progress)
    return result


def open(
    config: RunConfig, *, resume: Resume = False, observers: Sequence[object] = (), progress: bool = True
) -> Session:
    """Open a run whose training loop the caller writes; see `Session`.

    ``resume``, ``observers`` and ``progress`` are as in `train`. Entering the ``with`` block starts the processes, and
    leaving it stops them. Raises `PluginError` if no runtime is installed.
    """
    session: Session = _runtime().Session(config, mode=Mode(resume=resume), observers=observers, progress=progress)
    return session


def _runtime() -> Any:
    """Import the module that the runtime's entry point names."""
    found = entry_points(group="plasmid.runtime", name="train")
    if not found:
        raise PluginError("no runtime is installed; pip install plasmid-runtime")
    return import_module(next(iter(found)).module)
