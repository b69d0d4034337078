"""Registers the trainer and the checkpoint layouts. Imports neither torch nor megatron nor ray."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .conversion import MegatronTorch, TorchDistFolder
from .settings import Megatron


@hookimpl
def register_components() -> list[type[Component]]:
    return [Megatron, MegatronTorch, TorchDistFolder]
