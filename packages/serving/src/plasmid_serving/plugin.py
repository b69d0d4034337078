"""Registers the engine for servers of others."""

from __future__ import annotations

from plasmid.components import RolloutEngineConfig
from plasmid.plugins.hookspecs import hookimpl

from .remote.settings import Server


@hookimpl
def register_rollout_engines() -> list[type[RolloutEngineConfig]]:
    return [Server]
