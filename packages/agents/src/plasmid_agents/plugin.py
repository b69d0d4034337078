"""Plugin entry point of this package."""

from plasmid import Component, hookimpl

from .environments.workflows import OpenEnv, Verifiers
from .mcp.tool import Mcp
from .reported import Reported
from .workflow import Agent


@hookimpl
def register_components() -> list[type[Component]]:
    return [Agent, Mcp, OpenEnv, Reported, Verifiers]
