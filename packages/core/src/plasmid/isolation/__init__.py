"""Work that may hang, crash or do harm, run where it cannot: in worker processes, and programs in sandboxes."""

from .pool import Answer, Limits, WorkerPool
from .sandbox import Outcome, Program, Sandbox, SandboxSettings

__all__ = ["Answer", "Limits", "Outcome", "Program", "Sandbox", "SandboxSettings", "WorkerPool"]
