"""Registers the checkpoint layouts."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from . import DCP, GGUF, HF


@hookimpl
def register_components() -> list[type[Component]]:
    return [DCP, GGUF, HF]
