"""Isolation of work that may hang, crash or do harm: worker processes, and sandboxes for programs.

Names are imported when they are first used, so that worker processes start faster.
"""

from typing import TYPE_CHECKING

from plasmid.lazy_exports import export_lazily

if TYPE_CHECKING:
    from .batch_pool import BatchPool
    from .pool import Answer, Limits, WorkerPool
    from .sandbox import Outcome, Program, Sandbox, SandboxSettings

__all__ = [
    "Answer",
    "BatchPool",
    "Limits",
    "Outcome",
    "Program",
    "Sandbox",
    "SandboxSettings",
    "WorkerPool",
]

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "batch_pool": ("BatchPool",),
        "pool": ("Answer", "Limits", "WorkerPool"),
        "sandbox": ("Outcome", "Program", "Sandbox", "SandboxSettings"),
    },
)
