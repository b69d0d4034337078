"""What this package registers."""

from plasmid import Workflow, hookimpl

from .workflow import Agent


@hookimpl
def register_workflows() -> list[type[Workflow]]:
    return [Agent]
