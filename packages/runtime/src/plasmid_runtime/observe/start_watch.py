"""Tells observers what a starting run waits for: the waits in the ledger of the driver, by part of the run."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from math import inf

from plasmid.utils.waits.ledger import LEDGER

POLL_S = 0.25
CALL = re.compile(r"(?P<process>(?P<part>[a-z-]+?)(-\d[^.]*)?)\.(?P<method>\w+)")
"""Name of a wait for a call to a process of the run, for example ``trainer-0.join``."""
STAGES = {
    "start": "starting and importing",
    "listen": "connecting",
    "join": "loading weights",
    "load": "loading weights",
    "launch": "server importing, loading weights and warming up",
    "open": "opening workflows and rewards",
}
"""What a process does in each call of its start."""


def ignore_events(hook: str, /, **arguments: object) -> None:
    """Emit nothing, for runs without observers."""


class StartWatch:
    """Emits ``start_advanced`` whenever the parts change that the start of the run waits for."""

    def __init__(self, emit: Callable[..., None]) -> None:
        """``emit`` is `ObserverQueues.emit`."""
        self._emit = emit
        self._spans: dict[str, tuple[float, float]] = {}
        """First wait for each part, and the last time at which it was waited for."""
        self._shown: dict[str, str] | None = None

    @contextmanager
    def opening_cluster(self) -> Iterator[None]:
        """List the start of Ray, which blocks the event loop, as a wait."""
        with LEDGER.enter("ray.start", inf):
            self.look()
            yield
            self.look()  # nothing changed, but Ray took until now
        self.look()

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        """Look every `POLL_S` seconds for as long as the context lasts."""

        async def poll() -> None:
            while True:
                self.look()
                await asyncio.sleep(POLL_S)

        task = asyncio.create_task(poll())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.look()

    def look(self) -> None:
        """Compare the ledger with what was emitted last."""
        now, waits = time.monotonic(), dict[str, str]()
        for wait in LEDGER.waits():
            found = CALL.fullmatch(wait.what)
            if found is None or found["method"] not in STAGES:
                continue
            waits[found["process"]] = STAGES[found["method"]]
            first, _ = self._spans.get(found["part"], (wait.since, now))
            self._spans[found["part"]] = (first, now)
        if waits != self._shown:
            self._shown = waits
            seconds = {part: end - first for part, (first, end) in self._spans.items()}
            self._emit("start_advanced", waits=waits, seconds=seconds)
