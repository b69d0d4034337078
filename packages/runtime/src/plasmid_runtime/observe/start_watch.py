"""Reports to observers which processes a starting run waits for, from the ledger of waits in the driver."""

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
    "prepare": "starting and importing",
    "launch": "server importing, loading weights and warming up",
    "open_early": "opening rewards",
    "open": "opening workflows and rewards",
}
"""Stage of a process during each call of its start-up, by the name of the method."""


def ignore_events(hook: str, /, **arguments: object) -> None:
    """Emit nothing, for runs without observers."""


class StartWatch:
    """Emits ``start_advanced`` whenever the set of processes that are not ready, or one of their stages, changes."""

    def __init__(self, emit: Callable[..., None]) -> None:
        """``emit`` is `ObserverQueues.emit`."""
        self._emit = emit
        self._spans: dict[str, tuple[float, float]] = {}
        """Start of the first wait for each part, and the last time at which the part was not ready."""
        self._shown: dict[str, str] | None = None

    @contextmanager
    def watch_cluster_start(self) -> Iterator[None]:
        """List the start of Ray, which blocks the event loop, as a wait."""
        with LEDGER.enter("ray.start", inf):
            self.update()
            yield
            self.update()  # updates the duration of Ray's start
        self.update()

    @asynccontextmanager
    async def poll(self) -> AsyncIterator[None]:
        """Call `update` every `POLL_S` seconds while the context is active."""

        async def update_repeatedly() -> None:
            while True:
                self.update()
                await asyncio.sleep(POLL_S)

        task = asyncio.create_task(update_repeatedly())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.update()

    def update(self) -> None:
        """Read the ledger, and emit an event if the waits have changed."""
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
