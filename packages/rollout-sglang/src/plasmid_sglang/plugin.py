"""Registers the rollout engine ``sglang``. Imports neither torch nor SGLang."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .settings import SGLang


@hookimpl
def register_components() -> list[type[Component]]:
    return [SGLang]
