"""Workflows for agents that access the policy over HTTP.

Names are imported when they are first used, so that processes of agents start faster.
"""

from typing import TYPE_CHECKING

from plasmid.lazy_exports import export_lazily

if TYPE_CHECKING:
    from .workflow import Agent

__all__ = [
    "Agent",
]

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "workflow": ("Agent",),
    },
)
