"""Registers workflows, tools and environments."""

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

import plasmid_workflows


@hookimpl
def register_components() -> list[type[Component]]:
    """Return every component that the package exports."""
    return [getattr(plasmid_workflows, name) for name in plasmid_workflows.__all__]
