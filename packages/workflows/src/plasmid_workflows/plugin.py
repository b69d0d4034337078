"""Registers workflows, tools, environments, and formats of tool calls and reasoning."""

from plasmid.components import Component, ModelFamily
from plasmid.plugins.hookspecs import hookimpl

import plasmid_workflows

from .tools.formats import FAMILIES


@hookimpl
def register_components() -> list[type[Component]]:
    """Return every component that the package exports."""
    return [getattr(plasmid_workflows, name) for name in plasmid_workflows.__all__]


@hookimpl
def register_families() -> list[ModelFamily]:
    return list(FAMILIES)
