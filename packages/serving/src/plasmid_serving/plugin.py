"""Registers the engine for servers of others."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .remote.settings import Server


@hookimpl
def register_components() -> list[type[Component]]:
    return [Server]
