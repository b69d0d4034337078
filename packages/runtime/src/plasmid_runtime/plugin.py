"""Registers data sources, trackers and buffer policies. Imports neither torch nor ray."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .data.curriculum import Curriculum
from .data.datasets_folder import Datasets
from .data.demonstrations import Demonstrations
from .data.files import Files
from .data.function import Function
from .data.mixture import Mixture
from .observe.tensorboard import TensorBoard
from .observe.wandb import WandB
from .rollout.producers.buffer import FreshestFirst, OldestFirst, Priority


@hookimpl
def register_components() -> list[type[Component]]:
    return [
        TensorBoard,
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
