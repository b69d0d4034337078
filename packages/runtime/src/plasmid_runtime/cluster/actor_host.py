"""Host of an actor's object in its process: an event loop for async methods and one thread for all others."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from plasmid.errors import AlgorithmError
from plasmid.utils.waits.stacks import describe_process, locate

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Success:
    """Result of a call that returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of a call that raised, with its traceback in the remote process."""

    error: BaseException
    traceback: str


Outcome = Success | Failure


@dataclass(frozen=True, slots=True)
class ActorReport:
    """A process's report on what it is doing."""

    position: str
    """Running call of the thread, its duration, and its position in the code; empty if the thread is idle."""
    text: str


class ActorHost:
    """Contains one object and runs its methods.

    Async methods run on the event loop. All others run in one thread, one after another, because CUDA and process
    groups are bound to a thread, while the event loop stays responsive to health checks and stack dumps.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._object: Any = None
        self._numbers = itertools.count()
        self._queued = 0
        self._busy: tuple[str, float, int] | None = None
        """Method that runs in the thread, its start time, and the thread's id."""
        self._open: dict[int, tuple[str, float]] = {}
        """Calls in progress, with their start times."""

    async def make(self, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        """Create the object in its thread."""

        def build() -> None:
            self._object = factory(*args, **kwargs)

        return await self._outcome(self._in_thread("start", build))

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        """Call a method of the object."""
        bound = getattr(self._object, method)
        key = next(self._numbers)
        self._open[key] = (method, time.monotonic())
        try:
            if inspect.iscoroutinefunction(bound):
                return await self._outcome(bound(*args, **kwargs))
            return await self._outcome(self._in_thread(method, lambda: bound(*args, **kwargs)))
        finally:
            del self._open[key]

    def _in_thread(self, method: str, work: Callable[[], Any]) -> asyncio.Future[Any]:
        def run() -> Any:
            self._queued -= 1
            self._busy = (method, time.monotonic(), threading.get_ident())
            try:
                return work()
            finally:
                self._busy = None

        self._queued += 1
        return asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def close(self, *, wait: bool = True) -> Outcome:
        """Close the object, if it has a ``close`` method.

        Without ``wait``, does not call a method that would have to wait for the thread, which cannot be interrupted.
        """
        close = getattr(self._object, "close", None)
        is_blocked = self._busy is not None or self._queued > 0
        if close is None or (is_blocked and not wait and not inspect.iscoroutinefunction(close)):
            return Success(None)
        return await self.call("close", (), {})

    async def report(self) -> ActorReport:
        """Report what this process is doing, to explain why a call does not return."""
        now, busy, position = time.monotonic(), self._busy, ""
        if busy is not None:
            method, since, thread = busy
            position = f"{method} for {now - since:.1f} s, at {locate(thread)}"
        calls = [f"  {method}: for {now - since:.1f} s" for method, since in list(self._open.values())]
        lines = [f"thread of {self._name}: {position or 'idle'}; {self._queued} calls queued", "open calls:", *calls]
        return ActorReport(position, "\n".join(lines) + "\n" + describe_process())

    async def _outcome(self, awaitable: Any) -> Outcome:
        try:
            return Success(await awaitable)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if isinstance(error, AlgorithmError):
                log.error("%s", error, exc_info=True)  # the driver prints one line, without the traceback
            return Failure(_make_picklable(error), traceback.format_exc())


def _make_picklable(error: Exception) -> Exception:
    """Return the error, or a substitute with the same message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - boundary: third-party errors may refuse to be pickled in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def unwrap_outcome(outcome: Outcome, name: str) -> Any:
    """Return the value of a call, or raise its error with the remote traceback as a note."""
    if isinstance(outcome, Success):
        return outcome.value
    outcome.error.add_note(f"in process {name}:\n{outcome.traceback}")
    raise outcome.error
