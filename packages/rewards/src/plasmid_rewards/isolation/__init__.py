"""Rewards in worker processes: each call in a process of its own, with a deadline."""

from .pool import Limits, WorkerPool
from .pooled import PooledReward

__all__ = ["Limits", "PooledReward", "WorkerPool"]
