"""Registers the rollout engine ``sglang``, and its API for the engine ``server``. Imports neither torch nor SGLang."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .generate_api import GenerateApi
from .settings import SGLang


@hookimpl
def register_components() -> list[type[Component]]:
    return [SGLang, GenerateApi]
