"""Registers the embedded rollout engine ``hf``. Imports no torch."""

from __future__ import annotations

from plasmid.components import RolloutEngineConfig
from plasmid.plugins.hookspecs import hookimpl

from .settings import HF


@hookimpl
def register_rollout_engines() -> list[type[RolloutEngineConfig]]:
    return [HF]
