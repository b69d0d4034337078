"""Deadlines of trainer and engine calls, derived from the durations of earlier calls of the same kind.

A hanging call ends the run with an error that names it. Weight syncs have a single deadline for both sides, which
`device_scheduler` enforces. `close` has none.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from plasmid.config.loop import LoopConfig
from plasmid.protocols import Finish, RolloutEngine, Trainer
from plasmid.utils.waiting import GRACE, deadline

T = TypeVar("T")
TRAINER_CALLS = {"score", "train", "logprobs", "load", "export", "offload", "onload", "metrics"}
ENGINE_CALLS = {"expect", "pause", "resume", "sleep", "wake", "health", "metrics"}
"""Methods of an engine with a deadline. `WorkerPool` limits the requests of rollouts."""


class CallLimits:
    """Deadlines of calls by name: fixed for the first call, then derived from the longest one so far.

    A call that usually takes seconds and now takes minutes probably hangs, and ends long before the fixed limit.
    """

    def __init__(self, run: LoopConfig) -> None:
        self._factor, self._least_s = run.hang_factor, run.hang_min_s
        self._longest: dict[str, float] = {}

    def limit(self, call: str, fixed_s: float) -> tuple[float, str]:
        """Return the limit of the next call, in seconds, and its explanation; empty for the fixed limit."""
        longest = self._longest.get(call)
        if longest is None or not self._factor:
            return fixed_s, ""
        least = max(self._least_s, self._factor * longest)
        if least >= fixed_s:
            return fixed_s, ""
        return least, f"; the longest one so far took {longest:.1f} s (run.hang_factor, run.hang_min_s)"

    @asynccontextmanager
    async def deadline(self, call: str, fixed_s: float, what: str) -> AsyncIterator[None]:
        """Return a context with the deadline of a call. Raises `DeadlineError`."""
        limit_s, why = self.limit(call, fixed_s)
        began = time.monotonic()
        async with deadline(limit_s, what + why):
            yield
        self._longest[call] = max(self._longest.get(call, 0.0), time.monotonic() - began)


class _Deadlines:
    """Forwards to ``inner``, and limits the duration of ``limited`` methods."""

    limited = ENGINE_CALLS

    def __init__(self, inner: Any, name: str, setting: str, limit_s: float, limits: CallLimits) -> None:
        self.inner = inner
        self._name, self._setting, self._limit_s, self._limits = name, setting, limit_s * GRACE, limits

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in self.limited:
            return found
        return lambda *args, **options: self._limit(name, found(*args, **options))

    async def _limit(self, method: str, call: Awaitable[T]) -> T:
        name = f"{self._name}.{method}"
        async with self._limits.deadline(name, self._limit_s, f"{name} ({self._setting})"):
            return await call


class _DeadlineTrainer(_Deadlines):
    limited = TRAINER_CALLS

    async def save(self, path: Path) -> Finish | None:
        finish: Finish | None = await self._limit("save", self.inner.save(path))
        return None if finish is None else lambda: self._limit("save", finish())


def limit_trainer(trainer: Trainer, run: LoopConfig, limits: CallLimits) -> Trainer:
    """Wrap a trainer, and limit each call to `run.train_timeout_s`."""
    return cast(Trainer, _DeadlineTrainer(trainer, "trainer", "run.train_timeout_s", run.train_timeout_s, limits))


def limit_engine(engine: RolloutEngine, run: LoopConfig, limits: CallLimits) -> RolloutEngine:
    """Wrap an engine, and limit each call to `run.sync_timeout_s`."""
    return cast(RolloutEngine, _Deadlines(engine, "engine", "run.sync_timeout_s", run.sync_timeout_s, limits))
