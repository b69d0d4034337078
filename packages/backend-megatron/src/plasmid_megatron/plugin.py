"""Registers the trainer. Imports neither torch nor megatron nor ray."""

from __future__ import annotations

from plasmid.components import TrainerConfig
from plasmid.hookspecs import hookimpl

from .settings import Megatron


@hookimpl
def register_trainers() -> list[type[TrainerConfig]]:
    return [Megatron]
