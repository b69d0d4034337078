"""Registers the trainer and the layouts of checkpoints. Imports neither torch nor megatron nor ray."""

from __future__ import annotations

from plasmid.components import Converter, TrainerConfig
from plasmid.plugins.hookspecs import hookimpl

from .conversion import MegatronTorch, TorchDistFolder
from .settings import Megatron


@hookimpl
def register_trainers() -> list[type[TrainerConfig]]:
    return [Megatron]


@hookimpl
def register_converters() -> list[type[Converter]]:
    return [MegatronTorch, TorchDistFolder]
