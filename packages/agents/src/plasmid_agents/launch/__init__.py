"""Running agents: a process each, with a deadline."""

from .commands import run_command
from .functions import FunctionHost
from .target import Target
from .task import AgentFailed, Result, Task

__all__ = ["AgentFailed", "FunctionHost", "Result", "Target", "Task", "run_command"]
