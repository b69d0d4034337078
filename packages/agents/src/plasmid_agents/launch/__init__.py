"""Execution of agents, each in a process with a deadline."""

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
