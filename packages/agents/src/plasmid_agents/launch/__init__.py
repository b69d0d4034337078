"""Execution of agents, each in a process with a deadline.

Names are imported when they are first used, so that processes of agents start faster.
"""

from typing import TYPE_CHECKING

from plasmid.lazy_exports import export_lazily

if TYPE_CHECKING:
    from .commands import check_command, run_command
    from .functions import FunctionHost, check_function
    from .service import ServiceHost
    from .task import AgentFailed, Result, Task

__all__ = [
    "AgentFailed",
    "FunctionHost",
    "Result",
    "ServiceHost",
    "Task",
    "check_command",
    "check_function",
    "run_command",
]

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "commands": ("check_command", "run_command"),
        "functions": ("FunctionHost", "check_function"),
        "service": ("ServiceHost",),
        "task": ("AgentFailed", "Result", "Task"),
    },
)
