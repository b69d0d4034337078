"""Running agents: a process each, with a deadline."""

from .commands import check_command, run_command
from .functions import FunctionHost
from .target import check_function
from .task import AgentFailed, Result, Task

__all__ = ["AgentFailed", "FunctionHost", "Result", "Task", "check_command", "check_function", "run_command"]
