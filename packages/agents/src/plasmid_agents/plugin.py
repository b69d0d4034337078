"""What this package registers."""

from plasmid import Component, hookimpl

from .workflow import Agent


@hookimpl
def register_components() -> list[type[Component]]:
    return [Agent]
