"""Every extension point.

The ``register_*`` hooks return component classes; core indexes them by ``kind``. The others observe a run and return
nothing. An implementation may leave out arguments it does not need, so adding an argument to a hook breaks no plugin.
``batch`` and ``step`` are the number of a batch, counted from 1; 0 stands for what comes before the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pluggy

from ..components import (
    Algorithm,
    Converter,
    DataSource,
    Filter,
    Reward,
    RolloutEngineConfig,
    Tracker,
    TrainerConfig,
    Workflow,
)
from ..components.buffer_policy import BufferPolicy
from ..components.interaction import Environment, Tool
from ..types import Prompt, Sample
from ..types.batch import GroupRef

hookspec = pluggy.HookspecMarker("plasmid")
hookimpl = pluggy.HookimplMarker("plasmid")


@hookspec
def register_trainers() -> list[type[TrainerConfig]]:
    """Training backends, chosen by ``[trainer] kind = ...``."""


@hookspec
def register_rollout_engines() -> list[type[RolloutEngineConfig]]:
    """Inference engines, chosen by ``[rollout] kind = ...``."""


@hookspec
def register_rewards() -> list[type[Reward]]:
    """Rewards, listed under ``[[rewards]]``; a sample's reward is their weighted sum."""


@hookspec
def register_filters() -> list[type[Filter]]:
    """Filters, listed under ``[[filters]]``; a group is trained on if all of them keep it."""


@hookspec
def register_converters() -> list[type[Converter]]:
    """Checkpoint layouts, chosen by ``rl convert --from ... --to ...``."""


@hookspec
def register_algorithms() -> list[type[Algorithm]]:
    """Methods (advantage and loss), chosen by ``[algorithm] kind = ...``."""


@hookspec
def register_workflows() -> list[type[Workflow]]:
    """How one prompt becomes samples, chosen by ``[workflow] kind = ...``."""


@hookspec
def register_tools() -> list[type[Tool]]:
    """What a policy may call, listed under ``[[workflow.tools]]`` with ``workflow.kind = "tools"``."""


@hookspec
def register_environments() -> list[type[Environment]]:
    """Where a policy may act, chosen by ``[workflow.environment] kind = ...``."""


@hookspec
def register_data_sources() -> list[type[DataSource]]:
    """Where prompts come from, chosen by ``[data] kind = ...``."""


@hookspec
def register_buffer_policies() -> list[type[BufferPolicy]]:
    """Which of the groups that wait for training are taken first, chosen by ``[buffer] kind = ...``."""


@hookspec
def register_trackers() -> list[type[Tracker]]:
    """Where metrics go besides JSONL, listed under ``[[trackers]]``."""


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
