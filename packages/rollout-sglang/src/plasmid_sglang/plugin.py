"""Registers the rollout engine ``sglang``. Imports neither torch nor SGLang."""

from __future__ import annotations

from plasmid.components import RolloutEngineConfig
from plasmid.plugins.hookspecs import hookimpl

from .settings import SGLang


@hookimpl
def register_rollout_engines() -> list[type[RolloutEngineConfig]]:
    return [SGLang]
