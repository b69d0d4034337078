"""Server of a run's control socket: reports progress to `rl attach` and carries out its requests."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from plasmid.config.run import RunConfig
from plasmid.plugins.hookspecs import hookimpl
from plasmid.types.batch import GroupRef

from ..loop.loop import Loop
from .protocol import COMMANDS, MAX_REQUEST, SOCKET, check_peer, decode, encode, listen, remove

log = logging.getLogger(__name__)
MAX_CLIENTS = 8
MAX_UNSENT = 4 << 20
"""Maximum number of bytes that a client may leave unread; its connection is then closed."""
MAX_STORED_STEPS = 8
"""Number of recent batches whose metrics a new client receives."""
REQUEST_TIMEOUT_S = 10.0


class ControlServer:
    """Serves the socket ``control.sock`` of a run. It is an observer, whose hooks another thread calls."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._events: asyncio.AbstractEventLoop | None = None
        self._loop: Loop | None = None
        self._clients: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._batches = config.run.batches
        self._phase: dict[str, Any] = {"event": "phase_started", "batch": 0, "phase": "start", "version": 0}
        self._steps: deque[dict[str, Any]] = deque(maxlen=MAX_STORED_STEPS)
        self._evaluations: dict[str, dict[str, Any]] = {}

    @asynccontextmanager
    async def listen(self, folder: Path) -> AsyncIterator[None]:
        """Listen in the run folder. If that fails, logs a warning, and the run continues without the socket."""
        self._events = asyncio.get_running_loop()
        server = None
        try:
            server = await asyncio.start_unix_server(self._serve, sock=listen(folder), limit=MAX_REQUEST)
        except OSError as error:
            log.warning("%s: rl attach will not work: %s", folder / SOCKET, error.strerror or error)
        try:
            yield
        finally:
            await asyncio.sleep(0)  # first send the events that the observer thread has queued in this loop
            self._broadcast({"event": "run_ended"})
            if server is not None:
                server.close()
                remove(folder)
            for writer in list(self._clients):
                writer.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def serve(self, loop: Loop | None) -> None:
        """Carry out requests with this loop from now on; None refuses them."""
        self._loop = loop

    # ---- observer hooks

    @hookimpl
    def run_started(self, run_dir: Path, batches: int) -> None:
        self._batches = batches

    @hookimpl
    def phase_started(self, batch: int, phase: str, version: int) -> None:
        self._emit({"event": "phase_started", "batch": batch, "phase": phase, "version": version})

    @hookimpl
    def group_scored(self, group: GroupRef) -> None:
        self._emit({"event": "group_scored", "dropped": bool(group.dropped_by)})

    @hookimpl
    def batch_finished(self, batch: int, metrics: Mapping[str, float]) -> None:
        self._emit({"event": "batch_finished", "batch": batch, "metrics": dict(metrics)})

    @hookimpl
    def evaluation_finished(self, batch: int, name: str, metrics: Mapping[str, float]) -> None:
        self._emit({"event": "evaluation_finished", "batch": batch, "name": name, "metrics": dict(metrics)})

    @hookimpl
    def checkpoint_saved(self, batch: int, path: Path, seconds: float) -> None:
        self._emit({"event": "checkpoint_saved", "batch": batch, "path": str(path), "seconds": seconds})

    def _emit(self, message: dict[str, Any]) -> None:
        if self._events is not None and not self._events.is_closed():
            self._events.call_soon_threadsafe(self._record, message)

    # ---- in the run's event loop

    def _record(self, message: dict[str, Any]) -> None:
        kind = message["event"]
        if kind == "phase_started":
            self._phase = message
        elif kind == "batch_finished":
            self._steps.append(message)
        elif kind == "evaluation_finished":
            self._evaluations[message["name"]] = message
        self._broadcast(message)

    def _broadcast(self, message: dict[str, Any]) -> None:
        line = encode(message)
        for writer in list(self._clients):
            if writer.transport.get_write_buffer_size() > MAX_UNSENT:
                self._clients.discard(writer)
                writer.transport.abort()
            else:
                writer.write(line)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection: a request, an answer, and then events if the request is ``watch``."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            check_peer(writer.get_extra_info("socket"))
            if len(self._tasks) > MAX_CLIENTS:
                raise ValueError(f"{MAX_CLIENTS} clients are already attached")
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = decode(await reader.readuntil(b"\n"))
            command = request.get("do")
            if command not in COMMANDS:
                raise ValueError("no such request")
            writer.write(
                encode(self._initial_state() if command == "watch" else {"event": "answer", **self._carry_out(command)})
            )
            if command == "watch":
                for message in (*self._steps, *self._evaluations.values(), self._phase):
                    writer.write(encode(message))
                self._clients.add(writer)
                await reader.read(1)  # clients send nothing more, so this returns when they disconnect
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
            log.warning("%s: a connection was refused: %s", SOCKET, error or type(error).__name__)
        finally:
            self._clients.discard(writer)
            self._tasks.discard(task)
            writer.close()

    def _initial_state(self) -> dict[str, Any]:
        run = self._config.run
        return {
            "event": "attached",
            "recipe": self._config.recipe,
            "batches": self._batches,
            "prompts_per_batch": run.prompts_per_batch,
        }

    def _carry_out(self, command: str) -> dict[str, Any]:
        """Carry out a request and return the answer."""
        loop = self._loop
        if loop is None:
            return {"ok": False, "text": "the run is starting or ending; try again when it samples"}
        if command == "checkpoint" and loop.trainer is None:
            return {"ok": False, "text": "the run has no trainer to save"}
        if loop.stopping.is_set():
            return {"ok": False, "text": "the run is already stopping"}
        waits = loop.requests.is_waiting
        if command == "stop":
            loop.stop()
            text = "the run saves and stops" + ("" if waits else " after the current batch")
        elif command == "checkpoint":
            loop.requests.checkpoint()
            text = "a checkpoint is written" + ("" if waits else " after the current batch")
        elif command == "pause":
            loop.requests.pause()
            text = "the run is paused" if waits else "the run pauses after the current batch"
        else:
            loop.requests.resume()
            text = "the run continues"
        log.warning("rl attach: %s", text)
        return {"ok": True, "text": text}
