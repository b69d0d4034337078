"""Functions as agents, each rollout in a process that is forked from one that has imported them (`fork_server`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from plasmid.errors import PluginError, one_line
from plasmid.plugins.functions import FunctionName, with_here

from .task import AgentFailed, Result, Task

START_S = 120.0
"""Time to import an agent."""
LONGEST = 64 << 20
"""Bytes of one result."""
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from plasmid_agents.launch.fork_server import main
main()
"""


class FunctionHost:
    """Runs one function, many times at once."""

    def __init__(self, target: FunctionName, environment: Mapping[str, str], *, max_file_bytes: int) -> None:
        self._target, self._environment, self._max_file_bytes = target, dict(environment), max_file_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def start(self) -> None:
        """Import the function's module in a process of its own. Raises `PluginError` if it cannot be imported."""
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        with_here()
        ours, theirs = socket.socketpair()
        name = f"{self._target.module}:{self._target.function}"
        path = json.dumps([os.path.abspath(p) for p in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, path, str(theirs.fileno()), name],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )
        self._control = ours
        ours.settimeout(START_S)
        try:
            with ours.makefile("r", encoding="utf-8") as lines:
                first = json.loads(lines.readline() or '{"error": "the process ended"}')
        except TimeoutError:
            first = {"error": f"the import took longer than {START_S:g} s"}
        if "error" in first:
            self.close()
            why = " ".join(first["error"].split())
            hint = "; workflow.environment names variables that agents get" if why.startswith("KeyError") else ""
            raise PluginError(f"workflow.function: {name} cannot be loaded: {why}{hint}")
        ours.setblocking(False)

    async def run(self, task: Task) -> Result:
        """Run the function once. Raises `AgentFailed`; if it is cancelled, the process and all it started is killed."""
        ours, theirs = socket.socketpair()
        with theirs:
            await self._hand_over(theirs)
        reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST)
        pid: int | None = None
        try:
            pid = int((await self._read(reader))["pid"])
            work = {
                "arguments": task.arguments(),
                "environment": task.environment(),
                "max_file_bytes": self._max_file_bytes,
            }
            writer.write(json.dumps(work, default=str).encode() + b"\n")
            outcome = await self._read(reader)
        finally:
            writer.close()
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        if "error" in outcome:
            raise AgentFailed(" ".join(str(outcome["error"]).split()))
        result = outcome.get("result")
        if not isinstance(result, dict):
            raise AgentFailed("its result cannot be read: it is no result")
        answer = result.pop("answer", None)
        return Result(answer=answer if answer is None else str(answer), metadata=result)

    async def _hand_over(self, theirs: socket.socket) -> None:
        assert self._control is not None, "start comes first"
        while True:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                return
            except BlockingIOError:  # many rollouts begin at one moment
                await asyncio.sleep(0.01)
            except OSError as error:
                raise AgentFailed(f"the process that runs {self._target.function!r} is gone: {error}") from None

    async def _read(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        try:
            line = await reader.readline()
        except (ConnectionError, ValueError) as error:
            raise AgentFailed(f"its result cannot be read: {error}") from None
        if not line:
            raise AgentFailed("its process died")
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:  # the agent can write there as well
            raise AgentFailed(f"its result cannot be read: {one_line(error)}") from None

    def close(self) -> None:
        """End the process; agents that still run end with it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
