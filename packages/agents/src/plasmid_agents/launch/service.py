"""A program that serves many rollouts: started once, it exchanges tasks and results as lines of JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from plasmid.errors import PluginError, one_line
from plasmid.utils.printable import escape_unprintable

from .commands import SupervisedProcess, find_search_path
from .task import AgentFailed, Result, Task

MAX_LINE_BYTES = 16 << 20
"""Maximum length of one line, in bytes."""
MAX_LOGGED_LINES = 20
"""Maximum number of other output lines to log per process."""
log = logging.getLogger(__name__)


class ServiceHost:
    """Runs one program and communicates through its standard input and output.

    The program writes ``{"ready": true}`` once it can serve. Then it reads lines ``{"id": 1, "task": {...}}`` and
    ``{"cancel": 1}``, and answers each task with ``{"id": 1, "result": {...}}`` or ``{"id": 1, "error": "text"}``, in
    any order. A program that died is restarted for the next rollout.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        max_file_bytes: int,
        confined: bool,
        start_timeout_s: float,
    ) -> None:
        self._command, self._environment = tuple(command), dict(environment)
        self._max_file_bytes, self._confined, self._start_s = max_file_bytes, confined, start_timeout_s
        self._program: SupervisedProcess | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self._last_error = ""

    async def start(self) -> None:
        """Start the program and wait until it is ready. Raises `PluginError`."""
        try:
            await self._ensure_running()
        except AgentFailed as error:
            raise PluginError(f"workflow: {self._name}: {error}") from None

    @property
    def _name(self) -> str:
        return " ".join(self._command[:2])

    async def _ensure_running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._program is None or self._program.process.returncode is not None:
                await self.close()
                self._program = await self._start()
            return self._program.process

    async def _start(self) -> SupervisedProcess:
        program = await SupervisedProcess.start(
            self._command,
            max_file_bytes=self._max_file_bytes,
            confined=self._confined,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**self._environment, "PATH": find_search_path()},
            limit=MAX_LINE_BYTES,
        )
        self._program, self._last_error = program, ""
        ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting = {0: ready}
        self._reading = [
            asyncio.create_task(self._read(program)),
            asyncio.create_task(self._log_errors(program.process)),
        ]
        try:
            await asyncio.wait_for(ready, self._start_s)
        except TimeoutError:
            await self.close()
            raise AgentFailed(f"was not ready within workflow.start_timeout_s = {self._start_s:g}") from None
        return program

    async def run(self, task: Task) -> Result:
        """Run one task. Raises `AgentFailed`; a cancellation is forwarded to the program."""
        process = await self._ensure_running()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._write(process, {"id": number, "task": task.arguments()})
            outcome = await answer
        except asyncio.CancelledError:
            self._write(process, {"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in outcome:
            raise AgentFailed(" ".join(str(outcome["error"]).split())[:1000])
        result = outcome.get("result")
        if not isinstance(result, dict):
            raise AgentFailed("cannot read its result: not an object")
        said = result.pop("answer", None)
        return Result(answer=None if said is None else str(said), metadata=result)

    def _write(self, process: asyncio.subprocess.Process, line: dict[str, Any]) -> None:
        assert process.stdin is not None
        if not process.stdin.is_closing():
            process.stdin.write(json.dumps(line, default=str).encode() + b"\n")

    async def _read(self, program: SupervisedProcess) -> None:
        """Deliver results to waiting callers until the program ends."""
        assert program.process.stdout is not None
        why = "its process died"
        try:
            while line := await program.process.stdout.readline():
                self._deliver(line)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            why = f"cannot read its output: {one_line(error)}"
        await program.end()
        await asyncio.gather(*self._reading[1:], return_exceptions=True)
        last = f": {self._last_error}" if self._last_error else ""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(AgentFailed(f"{why}{last}"))

    def _deliver(self, line: bytes) -> None:
        message = json.loads(line, parse_constant=_refuse_constant)
        number = 0 if message.get("ready") is True else message.get("id")
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(message)

    async def _log_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        count = 0
        while chunk := await process.stderr.read(1 << 16):
            for text in chunk.decode(errors="replace").splitlines():
                if text.strip():
                    count, self._last_error = count + 1, escape_unprintable(text.strip())[-300:]
                    if count <= MAX_LOGGED_LINES:
                        log.info("%s: %s", self._name, self._last_error)

    async def close(self) -> None:
        """End the program and everything that it started."""
        if self._program is not None:
            reading = self._reading[:1]
            self._program.stop()
            await asyncio.gather(*reading, return_exceptions=True)  # this ends the program
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        self._program, self._reading = None, []


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")
