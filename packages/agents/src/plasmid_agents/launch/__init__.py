"""Running agents: a process each, with a deadline."""

from .commands import run_command
from .functions import FunctionHost
from .target import check_function
from .task import AgentFailed, Result, Task

__all__ = ["AgentFailed", "FunctionHost", "Result", "Task", "check_function", "run_command"]
