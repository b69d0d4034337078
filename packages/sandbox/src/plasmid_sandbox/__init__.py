"""Work that may hang, crash or do harm, run where it cannot: in worker processes, and programs in sandboxes."""

from .batch_pool import BatchPool
from .pool import Answer, Limits, WorkerPool
from .sandbox import Outcome, Program, Sandbox, SandboxSettings

__all__ = ["Answer", "BatchPool", "Limits", "Outcome", "Program", "Sandbox", "SandboxSettings", "WorkerPool"]
