"""Handle Ctrl-C and SIGTERM, and close the resources of a run."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

from plasmid.errors import ActorDiedError
from plasmid.protocols import Cluster

log = logging.getLogger(__name__)
CAUSE_S = 2.0
"""Maximum time to wait for the report of the cluster failure that killed a process, in seconds."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context in which signals end the current task cleanly.

    While the run can be saved (`save_with`), the first signal requests that. Any other signal cancels the task, which
    stops everything it has started. Has no effect outside the main thread, which cannot handle signals.
    """

    def __init__(self) -> None:
        self._stop: Callable[[], bool] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()
        for number in SIGNALS:
            before = signal.getsignal(number)
            try:
                loop.add_signal_handler(number, self._on_signal)
            except (ValueError, RuntimeError):
                break
            self._before[number] = before
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def save_with(self, stop: Callable[[], bool] | None) -> None:
        """Set the function that the first signal calls; None while the run cannot be saved.

        The function returns False if there is nothing to save, so that the first signal cancels the task.
        """
        self._stop = stop

    def _on_signal(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None and stop():
            log.warning("stopping: saving the run; press Ctrl-C again to quit without saving")
        elif self._task is not None:
            log.warning("stopping: terminating the processes of the run")
            self._task.cancel()


@contextlib.asynccontextmanager
async def raise_cluster_failures(cluster: Cluster) -> AsyncIterator[None]:
    """A context that raises `ActorDiedError` when the cluster fails, instead of the errors that this causes."""
    task, failures, is_running = asyncio.current_task(), list[str](), True
    assert task is not None

    async def watch() -> None:
        failures.append(await cluster.failure())
        if is_running:
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except ActorDiedError as error:
        is_running = False
        await asyncio.wait({watcher}, timeout=CAUSE_S)
        if failures:
            raise ActorDiedError(failures[0]) from error
        raise
    except asyncio.CancelledError:
        if not failures or task.uncancel():
            raise  # it was also cancelled from outside
        raise ActorDiedError(failures[0]) from None
    finally:
        watcher.cancel()


class LoggingExitStack(contextlib.AsyncExitStack):
    """Closes resources in reverse order. Logs errors and closes the remaining resources nevertheless."""

    def add_close(self, what: str, close: Callable[[], Any]) -> None:
        """Call ``close``, a sync or async function, at the end."""

        async def guard() -> None:
            try:
                result = close()
                if inspect.isawaitable(result):
                    await result
            except Exception:  # boundary: trackers and data sources are users' code
                log.exception("%s did not close", what)

        self.push_async_callback(guard)
