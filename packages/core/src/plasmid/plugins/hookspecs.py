"""Every extension point.

`register_components` returns classes; core indexes them by slot and ``kind``. The others observe a run and return
nothing. An implementation may leave out arguments it does not need, so adding an argument to a hook breaks no plugin.
``batch`` and ``step`` are the number of a batch, counted from 1; 0 stands for what comes before the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pluggy

from ..components import Component
from ..types import Prompt, Sample
from ..types.batch import GroupRef

hookspec = pluggy.HookspecMarker("plasmid")
hookimpl = pluggy.HookimplMarker("plasmid")


@hookspec
def register_components() -> list[type[Component]]:
    """Rewards, trainers, data sources, ...: every class that a recipe can choose by its ``kind``.

    The base class says which slot of the recipe a component is for.
    """


@hookspec
def run_started(run_dir: Path, batches: int) -> None:
    """Called in the driver once everything has been checked, before a process is started.

    ``batches`` is how many the run has when it ends: `run.batches`, or fewer if the data end before.
    """


@hookspec
def sample_generated(sample: Sample, prompt: Prompt) -> Sample | None:
    """May change a sample before it is scored: return a copy, or nothing to leave it as it is.

    Called in the rollout workers for every sample that did not fail. ``loss_mask`` (tokens may only be taken out),
    ``text``, ``metadata`` and ``stop_reason`` may change; anything else ends the run with the plugin's name.
    """


@hookspec
def batch_ready(batch: int, groups: tuple[GroupRef, ...]) -> tuple[GroupRef, ...] | None:
    """May change the ``rewards`` and ``components`` of a batch's groups before it is trained on.

    Called in the driver, before advantages are computed. Return the same groups in the same order, changed with
    `dataclasses.replace`, or nothing. The sample store keeps what the rewards had said.
    """


@hookspec
def phase_started(batch: int, phase: str, version: int) -> None:
    """The loop enters a phase: ``start``, ``sample``, ``score``, ``train``, ``sync``, ``save`` or ``evaluate``.

    ``batch`` is the number of the batch that the phase is about, from 1: the one that is sampled, scored, trained,
    synced, evaluated or saved. It is 0 for what comes before the first batch.
    """


@hookspec
def group_scored(group: GroupRef) -> None:
    """Called in the driver for every prompt group that has its rewards and has passed or failed the filters."""


@hookspec
def step_finished(step: int, metrics: Mapping[str, float]) -> None:
    """Called in the driver after every batch, once the engine has the new weights if it gets any."""


@hookspec
def evaluation_advanced(step: int, name: str, done: int, total: int) -> None:
    """Called in the driver when ``done`` of a set's ``total`` prompts have their rewards, first with 0."""


@hookspec
def evaluation_finished(step: int, name: str, metrics: Mapping[str, float]) -> None:
    """Called after every evaluation set; ``step`` is the number of batches trained so far, 0 before the first.

    With several sets it is called once more, with their mean, under the name ``mean``.
    """


@hookspec
def checkpoint_begun(step: int) -> None:
    """Called when a checkpoint is taken whose last files the trainer writes while the run goes on."""


@hookspec
def checkpoint_saved(step: int, path: Path, seconds: float) -> None:
    """Called once a checkpoint is complete under its final name, so many seconds after it was begun."""
