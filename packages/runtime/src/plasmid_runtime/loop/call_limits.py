"""Deadlines of trainer and engine calls, derived from the durations of earlier calls of the same kind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from plasmid.config.loop import LoopConfig
from plasmid.utils.waiting import deadline


class CallLimits:
    """Deadlines of calls by name: fixed for the first call, then derived from the longest one so far.

    A call that usually takes seconds and now takes minutes hangs. This detects it long before the fixed limit.
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
