"""Hooks that plugins can implement.

`register_components` returns component classes, `register_families` model families. `sample_generated` and
`batch_ready` may change training data, and all others only observe a run. Implementations may omit arguments. ``batch``
is the number of a batch, counted from 1; 0 means before the first batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pluggy

from ..components import Component, ModelFamily
from ..types import Prompt, Sample
from ..types.batch import GroupRef

hookspec = pluggy.HookspecMarker("plasmid")
hookimpl = pluggy.HookimplMarker("plasmid")
RENAMED = {
    "step_finished": "step_finished(step, metrics) is now batch_finished(batch, metrics)",
    "checkpoint_begun": "checkpoint_begun(step) is now checkpoint_started(batch)",
}
"""Errors for former names of hooks."""


@hookspec
def register_components() -> list[type[Component]]:
    """Return the component classes of the plugin: rewards, trainers, data sources, ...

    The base class of a component determines its slot in recipes; its ``kind`` is its name there.
    """


@hookspec
def register_families() -> list[ModelFamily]:
    """Return properties of model families: names of weights, layers, formats of tool calls and reasoning.

    Several plugins may each register a part of a family. Called in every process that needs a family.
    """


@hookspec
def run_started(run_dir: Path, batches: int) -> None:
    """Called in the driver after validation, before any process starts. The run folder exists.

    ``batches`` is the total number of batches: `run.batches`, or fewer if the data ends earlier.
    """


@hookspec
def sample_generated(sample: Sample, prompt: Prompt) -> Sample | None:
    """Change a sample before scoring: return a modified copy, or None for no change.

    Called in the rollout workers for every sample that did not fail. Only ``loss_mask`` (from True to False), ``text``,
    ``metadata`` and ``stop_reason`` may change; any other change ends the run with an error that names the plugin.
    """


@hookspec
def batch_ready(batch: int, groups: tuple[GroupRef, ...]) -> tuple[GroupRef, ...] | None:
    """Change the ``rewards`` and ``components`` of a batch's groups before training.

    Called in the driver, before advantages are computed. Return the same groups in the same order, changed with
    `dataclasses.replace`, or None for no change. Metrics contain the changed rewards, the sample store the original
    ones.
    """


@hookspec
def phase_started(batch: int, phase: str, version: int) -> None:
    """Called when the loop enters a phase.

    Phases are ``start``, ``sample``, ``score``, ``train``, ``sync``, ``save``, ``export``, ``evaluate`` and ``paused``.
    ``batch`` is the number of the batch that the phase processes; at ``start``, it is the last batch trained before a
    resume, or 0. ``version`` is the policy version.
    """


@hookspec
def start_advanced(waits: Mapping[str, str], seconds: Mapping[str, float]) -> None:
    """Called in the driver during start-up, whenever a process reaches its next stage.

    ``waits`` maps the name of each process that is not ready to its stage, and is empty when all are ready. ``seconds``
    maps each part (``ray``, ``trainer``, ``engine``, ...) to the time that start-up has waited for it; all parts except
    Ray start in parallel.
    """


@hookspec
def group_scored(group: GroupRef) -> None:
    """Called in the driver for every prompt group after rewards and filters, including groups that filters dropped."""


@hookspec
def batch_finished(batch: int, metrics: Mapping[str, float]) -> None:
    """Called in the driver after every batch, and after its weight sync if it has one."""


@hookspec
def evaluation_advanced(batch: int, name: str, done: int, total: int) -> None:
    """Called in the driver when ``done`` of ``total`` prompts of an evaluation set are scored; first with 0."""


@hookspec
def evaluation_finished(batch: int, name: str, metrics: Mapping[str, float]) -> None:
    """Called after each evaluation set.

    ``batch`` is the number of batches that had been trained when the evaluation was due. With several sets, called
    once more with their mean, under the name ``mean``.
    """


@hookspec
def checkpoint_started(batch: int) -> None:
    """Called when the trainer starts to write a checkpoint in the background, while training continues."""


@hookspec
def checkpoint_saved(batch: int, path: Path, seconds: float) -> None:
    """Called when a checkpoint is complete under its final name. ``seconds`` is the time since its start."""
