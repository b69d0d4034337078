"""Registers the trainer, its families and the checkpoint layouts. Imports neither torch nor megatron nor ray."""

from __future__ import annotations

from functools import partial
from typing import Any

from plasmid.components import Component, ModelFamily
from plasmid.plugins.hookspecs import hookimpl

from .conversion import MegatronTorch, TorchDistFolder
from .settings import Megatron
from .shapes import MODEL_TYPES


@hookimpl
def register_components() -> list[type[Component]]:
    return [Megatron, MegatronTorch, TorchDistFolder]


@hookimpl
def register_families() -> list[ModelFamily]:
    return [ModelFamily(model_type=name, layouts={"megatron": partial(_layout, name)}) for name in MODEL_TYPES]


def _layout(model_type: str) -> Any:
    from .weights.families import built_in  # imports torch

    return built_in(model_type)
