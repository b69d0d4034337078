"""Reports of missed deadlines: which process waits for which, and the current activity of every process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from plasmid.config.loop import LoopConfig
from plasmid.errors import DeadlineError, EngineError, PlasmidError, one_line
from plasmid.protocols import Cluster, ProcessState
from plasmid.utils.safe_files import write_text
from plasmid.utils.waits.ledger import LEDGER, Wait
from plasmid.utils.waits.loop_watch import LoopWatch
from plasmid.utils.waits.stacks import describe_process

from ..checkpoint.run_folder import RunFolder
from ..loop.loop import Loop
from ..observe.dispatch import ObserverQueues
from .startup import MakeCluster

log = logging.getLogger(__name__)
FRESH_S = 30.0
"""Maximum age of a report that explains an error, in seconds. Older ones concern deadlines that did not end the run."""
SHARED_S = 5.0
"""Waits that expire within this time after a report share it, in seconds."""
INSPECT_S = 20.0
"""Maximum time to inspect all processes, in seconds."""
ENGINE_METRICS_S = 2.0
ENGINE_QUEUES = ("engine/running", "engine/queued")
MAX_NAMED = 3
"""Maximum number of processes that an error names; the report lists all of them."""


class HangReporter:
    """Writes ``hangs/<phase>/`` into the run folder when a wait exceeds its deadline.

    Waits that expire at about the same time share a report.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "hangs"
        self._earlier_reports = self._entries()
        self._cluster: Cluster | None = None
        self._writing: asyncio.Task[str] | None = None
        self._written_at = 0.0
        self.depths: Callable[[], Awaitable[Mapping[str, float]]] = _no_depths
        """Returns the lengths of the run's queues, by name."""

    def wrap_cluster(self, make_cluster: MakeCluster) -> MakeCluster:
        """Wrap ``make_cluster``, so that reports inspect the processes of its cluster."""

        def make(folder: RunFolder) -> Cluster:
            self._cluster = make_cluster(folder)
            return self._cluster

        return make

    async def report(self, wait: Wait) -> None:
        """Write a report about a wait that exceeded its deadline."""
        await self._write([str(wait)])

    async def explain(self, error: PlasmidError) -> None:
        """Add the findings of a recent report, and the location of the stacks, to an error."""
        missed = isinstance(error, DeadlineError)
        if not missed and not (isinstance(error, EngineError) and self._entries() != self._earlier_reports):
            return
        if self._writing is None or time.monotonic() - self._written_at > FRESH_S:
            found = await self._write([str(error)])
        else:
            found = await self._writing
        error.args = (f"{error}; {found}",)

    def _entries(self) -> set[Path]:
        return set(self._folder.glob("*"))

    async def _write(self, waits: Sequence[str]) -> str:
        is_recent = self._written_at and time.monotonic() - self._written_at < SHARED_S
        if self._writing is None or (self._writing.done() and not is_recent):
            self._writing = asyncio.create_task(self._gather(waits))
        return await asyncio.shield(self._writing)

    async def _gather(self, waits: Sequence[str]) -> str:
        phase, own = LEDGER.phase(), describe_process()
        states, depths = await asyncio.gather(self._inspect(), self.depths())
        try:
            folder = await asyncio.to_thread(self._store, waits, phase, own, states, depths)
        except OSError as error:
            return f"{_where(phase)}; no report could be written: {one_line(error)}"
        self._written_at = time.monotonic()
        return "; ".join([_where(phase), *describe(states), f"stacks of all processes: {folder}"])

    async def _inspect(self) -> Sequence[ProcessState]:
        if self._cluster is None:
            return ()
        try:
            return await asyncio.wait_for(self._cluster.inspect(), INSPECT_S)
        except Exception as error:  # noqa: BLE001 - boundary: report the rest if the cluster is broken
            log.warning("the processes of the run cannot be inspected: %s", error)
            return ()

    def _store(
        self, waits: Sequence[str], phase: str, own: str, states: Sequence[ProcessState], depths: Mapping[str, float]
    ) -> Path:
        name = re.sub(r"[^a-z0-9]+", "-", phase) or "start"
        taken = len(list(self._folder.glob(f"{name}*/")))
        folder = self._folder / (f"{name}-{taken + 1}" if taken else name)
        folder.mkdir(parents=True)
        lines = [
            time.strftime("%Y-%m-%d %H:%M:%S"),
            f"phase: {phase or 'start'}",
            *(f"missed deadline: {wait}" for wait in waits),
            "queues:",
            *(f"  {name}: {count:g}" for name, count in depths.items()),
            "processes:",
            *(
                f"  {state.name} (process {state.pid}): {state.condition or 'runs'}; {state.position}"
                for state in states
            ),
        ]
        write_text(folder / "report.txt", "\n".join(lines) + "\n")
        write_text(folder / "driver.txt", own)
        for state in states:
            write_text(folder / _file_name(state), state.stacks)
        return folder


def describe(states: Sequence[ProcessState]) -> list[str]:
    """Describe processes that may cause the wait: stopped or unresponsive ones first, then busy ones."""
    unresponsive = [f"{one.name} (process {one.pid}) is {one.condition}{_at(one)}" for one in states if one.condition]
    busy = [f"{one.name} is in {one.position}" for one in states if one.position and not one.condition]
    found = [*unresponsive, *busy]
    return found if len(found) <= MAX_NAMED else [*found[:MAX_NAMED], f"and {len(found) - MAX_NAMED} more"]


def _file_name(state: ProcessState) -> str:
    """Return the name of a process's file. Processes of servers, whose names contain a slash, share names."""
    name = re.sub(r"[^\w.-]+", "-", state.name)
    return f"{name}-{state.pid}.txt" if "/" in state.name else f"{name}.txt"


def _where(phase: str) -> str:
    return f"in {phase}" if phase else "at the start"


async def _no_depths() -> Mapping[str, float]:
    return {}


def _at(state: ProcessState) -> str:
    return f", at {state.position}" if state.position else ""


@asynccontextmanager
async def report_hangs(folder: RunFolder, run: LoopConfig) -> AsyncIterator[HangReporter]:
    """Provide a context that explains errors caused by a hang: which process waits for which, and where the stacks are.

    Also raises `DeadlineError` in a call that blocks the event loop for more than ``run.driver_timeout_s``.
    """
    reporter = HangReporter(folder.path)
    watch = LoopWatch(run.driver_timeout_s, "run.driver_timeout_s", folder.path / "hangs" / "driver-blocked.txt")
    with LEDGER.report_to(reporter.report, asyncio.get_running_loop()), watch:
        try:
            yield reporter
        except PlasmidError as error:
            await reporter.explain(error)
            raise


async def queue_depths(loop: Loop, queues: ObserverQueues) -> Mapping[str, float]:
    """Return the lengths of a run's queues, including those of the engine if it responds."""
    found: dict[str, float] = {**loop.producer.depths(), **queues.depths()}
    if loop.engine is not None:
        with contextlib.suppress(PlasmidError, TimeoutError):
            gauges = await asyncio.wait_for(loop.engine.metrics(), ENGINE_METRICS_S)
            found |= {name: value for name, value in gauges.items() if name in ENGINE_QUEUES}
    return found
