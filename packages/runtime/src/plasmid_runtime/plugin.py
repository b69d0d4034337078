"""Registers data sources, trackers and buffer policies. Imports neither torch nor ray."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .data.curriculum import Curriculum
from .data.demonstrations import Demonstrations
from .data.files import Datasets, Files
from .data.function import Function
from .data.mixture import Mixture
from .observe.trackers.mlflow import MLflow
from .observe.trackers.tensorboard import TensorBoard
from .observe.trackers.trackio import Trackio
from .observe.trackers.wandb import WandB
from .rollout.producers.buffer import FreshestFirst, OldestFirst, Priority


@hookimpl
def register_components() -> list[type[Component]]:
    return [
        MLflow,
        TensorBoard,
        Trackio,
        WandB,
        Curriculum,
        Datasets,
        Demonstrations,
        Files,
        Function,
        Mixture,
        FreshestFirst,
        OldestFirst,
        Priority,
    ]
