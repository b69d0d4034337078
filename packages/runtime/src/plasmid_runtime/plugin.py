"""Registers data sources, trackers and buffer policies. Imports neither torch nor ray."""

from __future__ import annotations

from plasmid.components import DataSource, Tracker
from plasmid.components.buffer_policy import BufferPolicy
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
def register_trackers() -> list[type[Tracker]]:
    return [TensorBoard, WandB]


@hookimpl
def register_data_sources() -> list[type[DataSource]]:
    return [Curriculum, Datasets, Demonstrations, Files, Function, Mixture]


@hookimpl
def register_buffer_policies() -> list[type[BufferPolicy]]:
    return [FreshestFirst, OldestFirst, Priority]
