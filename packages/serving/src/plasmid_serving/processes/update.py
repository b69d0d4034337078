"""Engine side of a weight sync: a command to the processes of each server, and their results."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from plasmid.errors import EngineError, PlasmidError, SyncError
from plasmid.types import BucketSum, SyncResult

from ..connection import ServerConnection
from ..weights.command import UpdateCommand
from ..weights.errors import SyncAbortedError, connection_lost_error, encode_error


class Update:
    """The update of one server, from the command to the result."""

    def __init__(self, server: ServerConnection, command: UpdateCommand, version: int) -> None:
        self._server, self._command, self._version = server, command, version
        self._task = asyncio.ensure_future(self._run())
        self._reason: PlasmidError | None = None

    def cancel(self, reason: PlasmidError) -> None:
        """Cancel the update if it has not completed. The server must not serve, because weights may be partly
        written."""
        if not self._task.done():
            self._reason = reason
            self._task.cancel()

    async def heartbeats(self) -> int | None:
        """Return a count that grows while the server's processes progress; None if the update has ended or is lost."""
        if self._task.done():
            return None
        try:
            return await asyncio.to_thread(self._server.control.heartbeats, self._command.token)
        except RuntimeError:
            return None

    async def result(self) -> SyncResult:
        """Wait until all weights are in the model under their version. Raises `SyncError`, `EngineError`."""
        try:
            async with asyncio.timeout(self._command.timeout_s):
                return await self._task
        except TimeoutError:
            error: PlasmidError = SyncError(f"not finished within {self._command.timeout_s:g} s")
        except asyncio.CancelledError:
            if self._reason is None:
                self._end(SyncAbortedError("aborted by the engine"))
                raise
            error = self._reason
        except PlasmidError as failed:
            error = failed
        except RuntimeError as broken:
            error = connection_lost_error(broken)
        kind = type(error) if isinstance(error, SyncError | EngineError) else SyncError
        error = kind(f"weight sync of version {self._version}: {error}")
        await asyncio.to_thread(self._end, error)
        raise error

    def _end(self, error: Exception) -> None:
        """Stop the trainer's ranks and the server's processes from waiting any longer."""
        with contextlib.suppress(RuntimeError):
            command = self._command
            self._server.control.end_update(command.token, command.ranks, encode_error(error), senders=command.senders)

    async def _run(self) -> SyncResult:
        server, command = self._server, self._command
        await server.begin_update()
        began = time.perf_counter()
        results = await server.update(command, self._version)
        phases = _phases(results, time.perf_counter() - began)
        began = time.perf_counter()
        await server.end_update()
        found = results[0]
        if any((r["buckets"], r["num_tensors"]) != (found["buckets"], found["num_tensors"]) for r in results):
            raise SyncError("engine ranks received different bytes")
        return SyncResult(
            version=self._version,
            num_tensors=found["num_tensors"],
            buckets=tuple(BucketSum(index=i, num_bytes=n, checksum=c) for i, n, c in found["buckets"]),
            phases=phases | {"finish": time.perf_counter() - began},
        )


def _phases(results: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """Return seconds of the slowest process in each phase; ``command`` is the overhead of the server's own call."""
    slowest = {phase: max(r["seconds"][phase] for r in results) for phase in results[0]["seconds"]}
    return slowest | {"command": seconds - max(sum(r["seconds"].values()) for r in results)}
