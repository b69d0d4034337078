"""Isolation of work that may hang, crash or do harm: worker processes, and sandboxes for programs."""

from .batch_pool import BatchPool
from .pool import Answer, Limits, WorkerPool
from .sandbox import Outcome, Program, Sandbox, SandboxSettings

__all__ = ["Answer", "BatchPool", "Limits", "Outcome", "Program", "Sandbox", "SandboxSettings", "WorkerPool"]
