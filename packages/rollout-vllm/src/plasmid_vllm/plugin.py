"""Registers the rollout engine ``vllm``. Imports neither torch nor vLLM."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .settings import VLLM


@hookimpl
def register_components() -> list[type[Component]]:
    return [VLLM]
