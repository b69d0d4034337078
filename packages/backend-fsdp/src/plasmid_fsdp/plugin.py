"""Registers the trainer. Imports neither torch nor ray."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .settings import FSDP


@hookimpl
def register_components() -> list[type[Component]]:
    return [FSDP]
