"""Functions as agents: each rollout runs in a fork of a process that has imported them (`fork_server`)."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plasmid.errors import PluginError, one_line
from plasmid.plugins.functions import FunctionName, import_from_working_folder

from .task import AgentFailed, Result, Task


def check_function(name: FunctionName) -> None:
    """Raise `ValueError` if the source shows that there is no such function."""
    source = _source(name.module)
    if source is None:
        return  # a compiled module
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {name.module}: {error}") from None
    names = _defined_names(tree)
    if name.function not in names and "*" not in names:
        raise ValueError(f"{name.module} has no {name.function!r}; it defines {', '.join(sorted(names)) or 'nothing'}")


def _source(module: str) -> Path | None:
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise ValueError(f"no such file: {module}")
        return Path(module)
    import_from_working_folder()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ValueError(
            f"no module {module!r} is installed or in the current folder; for a file, use path/to/file.py:function"
        )
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _defined_names(tree: ast.Module) -> set[str]:
    """Return the names that the top level of a module defines or imports; ``*`` if only running it could tell."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif not isinstance(node, ast.Expr):
            names.add("*")
    return names


START_S = 120.0
"""Time limit for importing an agent, in seconds."""
END_S = 15.0
"""Time limit for a cancelled agent to end, in seconds."""
MAX_RESULT_BYTES = 64 << 20
"""Maximum size of one result, in bytes."""
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from plasmid_agents.launch.fork_server import main
main()
"""


class FunctionHost:
    """Runs one function many times concurrently."""

    def __init__(
        self, target: FunctionName, environment: Mapping[str, str], *, max_file_bytes: int, confined: bool
    ) -> None:
        self._target, self._environment = target, dict(environment)
        self._settings = {"limits": {"FSIZE": max_file_bytes}, "confined": confined}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def start(self) -> None:
        """Import the function's module in a separate process. Raises `PluginError` if it cannot be imported."""
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        import_from_working_folder()
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
                first = json.loads(lines.readline() or '{"error": "the process has ended"}')
        except TimeoutError:
            first = {"error": f"the import took longer than {START_S:g} s"}
        if "error" in first:
            self.close()
            why = " ".join(first["error"].split())
            hint = "; add variables that agents need to workflow.environment" if why.startswith("KeyError") else ""
            raise PluginError(f"workflow.function: {name} cannot be loaded: {why}{hint}")
        ours.setblocking(False)

    async def run(self, task: Task) -> Result:
        """Run the function once. On its end or on cancellation, kill everything that it started. Raises
        `AgentFailed`."""
        ours, theirs = socket.socketpair()
        with theirs:
            await self._send_socket(theirs)
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_RESULT_BYTES)
        work = {"arguments": task.arguments(), "environment": task.environment(), **self._settings}
        try:
            writer.write(json.dumps(work, default=str).encode() + b"\n")
            outcome = await self._read(reader)
        finally:
            await _end(reader, writer)
        if "error" in outcome:
            raise AgentFailed(" ".join(str(outcome["error"]).split()))
        result = outcome.get("result")
        if not isinstance(result, dict):
            raise AgentFailed("cannot read its result: not a result")
        answer = result.pop("answer", None)
        return Result(answer=answer if answer is None else str(answer), metadata=result)

    async def _send_socket(self, theirs: socket.socket) -> None:
        assert self._control is not None, "call start first"
        while True:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                return
            except BlockingIOError:  # many rollouts start at the same moment
                await asyncio.sleep(0.01)
            except OSError as error:
                raise AgentFailed(f"the process that runs {self._target.function!r} has ended: {error}") from None

    async def _read(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        try:
            line = await reader.readline()
        except (ConnectionError, ValueError) as error:
            raise AgentFailed(f"cannot read its result: {error}") from None
        if not line:
            raise AgentFailed("its process died")
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:  # the agent can write there, too
            raise AgentFailed(f"cannot read its result: {one_line(error)}") from None

    def close(self) -> None:
        """End the process and the agents that still run."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


async def _end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End the agent and wait until nothing of it is left, which closes the supervisor's end of the channel."""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write_eof()
        async with asyncio.timeout(END_S):
            while await reader.read(1 << 16):
                pass
    writer.close()
