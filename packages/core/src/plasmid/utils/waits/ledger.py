"""Record of a process's phases and of its waits that have deadlines; reports missed deadlines."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger(__name__)
MAX_PHASES = 20


@dataclass(slots=True, eq=False)
class Wait:
    """A wait in progress."""

    what: str
    """Process and operation that are waited for."""
    limit_s: float
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.what}: waiting for {time.monotonic() - self.since:.1f} s, limit {self.limit_s:g} s"


Report = Callable[[Wait], Awaitable[None]]
"""Writes a report about a wait that has reached its deadline, before it is cancelled."""


class Ledger:
    """Waits and phases of a process. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waits: dict[int, Wait] = {}
        self._phases: deque[tuple[str, float]] = deque(maxlen=MAX_PHASES)
        self._report: Report | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def enter(self, what: str, limit_s: float) -> Iterator[Wait]:
        """Record a wait for the duration of the block."""
        number, wait = next(self._numbers), Wait(what, limit_s)
        self._waits[number] = wait
        try:
            yield wait
        finally:
            del self._waits[number]

    def waits(self) -> list[Wait]:
        """Return the waits in progress, oldest first."""
        return list(self._waits.values())

    def has_missed_after(self, wait: Wait) -> bool:
        """Return True if a wait that started after this one has reached its deadline as well."""
        now = time.monotonic()
        return any(one.since > wait.since and now - one.since >= one.limit_s for one in self.waits())

    def begin_phase(self, name: str) -> None:
        """Record the start of a phase."""
        self._phases.append((name, time.monotonic()))

    def phase(self) -> str:
        """Return the name of the current phase; empty before the first."""
        return self._phases[-1][0] if self._phases else ""

    def phases(self) -> list[str]:
        """Return the most recent phases with their durations, the current one last."""
        phases = [*self._phases, ("", time.monotonic())]
        return [f"{name}: {end - began:.1f} s" for (name, began), (_, end) in itertools.pairwise(phases)]

    @contextmanager
    def report_to(self, report: Report, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Call ``report`` on ``loop`` for every wait that reaches its deadline during the block."""
        before, self._report, self._loop = (self._report, self._loop), report, loop
        self._phases.clear()
        try:
            yield
        finally:
            self._report, self._loop = before

    def report_always(self, report: Report) -> None:
        """Call ``report`` for every wait that reaches its deadline, on the wait's event loop, from now on."""
        self._report = report

    async def expire(self, wait: Wait) -> None:
        """Report a wait that has reached its deadline. Never raises, so that the deadline takes effect."""
        if self._report is None:
            return
        report = self._report(wait)
        try:
            if self._loop is None or self._loop is asyncio.get_running_loop():
                await report
            else:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_run(report), self._loop))
        except Exception:  # boundary: the disk may be full, or processes may end during the report
            log.exception("%s: the report of the missed deadline is incomplete", wait.what)


async def _run(report: Awaitable[None]) -> None:
    await report


LEDGER = Ledger()
"""Ledger of this process."""
