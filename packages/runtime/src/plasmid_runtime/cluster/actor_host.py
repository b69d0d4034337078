"""What sits in every process of a run: one object, an event loop for its async methods, one thread for the others."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from plasmid.errors import AlgorithmError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Success:
    """What a call returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """What a call raised, with the traceback of the process where it happened."""

    error: BaseException
    traceback: str


Outcome = Success | Failure


class ActorHost:
    """Holds one object and runs its methods.

    Async methods run on the event loop. All others run in one thread, one after another, so that code that must stay
    on its thread (CUDA, process groups) does, while the loop stays free to answer health checks and dump stacks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._object: Any = None

    async def make(self, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        """Make the object in its thread."""

        def build() -> None:
            self._object = factory(*args, **kwargs)

        return await self._outcome(asyncio.get_running_loop().run_in_executor(self._thread, build))

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        """Run one method of the object."""
        bound = getattr(self._object, method)
        if inspect.iscoroutinefunction(bound):
            return await self._outcome(bound(*args, **kwargs))
        loop = asyncio.get_running_loop()
        return await self._outcome(loop.run_in_executor(self._thread, lambda: bound(*args, **kwargs)))

    async def close(self) -> Outcome:
        """Close the object if it can be closed."""
        if hasattr(self._object, "close"):
            return await self.call("close", (), {})
        return Success(None)

    async def stacks(self) -> str:
        """Where every thread of this process stands: what to read when a call does not return."""
        frames = sys._current_frames()
        return "\n".join(f"thread {ident}:\n{''.join(traceback.format_stack(f))}" for ident, f in frames.items())

    async def _outcome(self, awaitable: Any) -> Outcome:
        try:
            return Success(await awaitable)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if isinstance(error, AlgorithmError):
                log.error("%s", error, exc_info=True)  # the user gets one line
            return Failure(_portable(error), traceback.format_exc())


def _portable(error: Exception) -> Exception:
    """The error itself if it can cross a process boundary, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - boundary: third-party errors may refuse to be pickled in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def unwrap_outcome(outcome: Outcome, name: str) -> Any:
    """The value of a call, or its error with the remote traceback as a note."""
    if isinstance(outcome, Success):
        return outcome.value
    outcome.error.add_note(f"in process {name}:\n{outcome.traceback}")
    raise outcome.error
