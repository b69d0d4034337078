"""What core itself registers, through the same hooks as everybody else. Imports neither torch nor ray."""

from __future__ import annotations

from .algorithms.grpo import GRPO
from .components import Algorithm, Converter, DataSource, Tracker, Workflow
from .convert import GGUF, HF
from .data.files import Files
from .hookspecs import hookimpl
from .observe.tensorboard import TensorBoard
from .observe.wandb import WandB
from .rollout.single_turn import SingleTurn


@hookimpl
def register_workflows() -> list[type[Workflow]]:
    return [SingleTurn]


@hookimpl
def register_trackers() -> list[type[Tracker]]:
    return [TensorBoard, WandB]


@hookimpl
def register_converters() -> list[type[Converter]]:
    return [GGUF, HF]


@hookimpl
def register_data_sources() -> list[type[DataSource]]:
    return [Files]


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [GRPO]
