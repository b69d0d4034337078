"""Running agents: a process each, with a deadline."""

from .commands import run_command
from .functions import FunctionHost
from .task import AgentFailed, Result, Task
from .target import Target

__all__ = ["AgentFailed", "FunctionHost", "Result", "Target", "Task", "run_command"]
