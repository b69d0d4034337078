"""The open tools of a recipe. Each call runs in a process that is then discarded; its result is text for the policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plasmid.components.interaction import Tool, ToolError, ToolServer
from plasmid.errors import ConfigError, IsolationError, RaisedError, one_line
from plasmid.plugins.functions import call
from plasmid.utils.waits.ledger import LEDGER
from plasmid_sandbox import Answer, Limits, WorkerPool

from . import signatures
from .parsing import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a call."""

    text: str
    is_error: bool = False


class Toolset:
    """Calls tools by name. Methods never raise because of a policy's text, but raise if the machine fails."""

    def __init__(
        self, tools: Sequence[Tool], limits: Limits, *, workers: Literal["auto"] | int, max_chars: int
    ) -> None:
        own = [tool for tool in tools if not isinstance(tool, ToolServer)]
        self._tools = {signatures.name_of(tool.implementation()): tool for tool in own}
        self._servers = [tool for tool in tools if isinstance(tool, ToolServer)]
        self._served: dict[str, ToolServer] = {}
        self._schemas = [signatures.schema(tool.implementation()) for tool in own]
        self._limits, self._max_chars = limits, max_chars
        isolated = tuple(tool for tool in tools if tool.isolated)
        self._pool = WorkerPool(ToolWork(isolated), limits, workers=workers) if isolated else None

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of all tools, as shown to the policy."""
        return self._schemas

    async def start(self) -> None:
        """Open the tools. Raises `IsolationError` if one cannot be opened, `ConfigError` for servers and duplicate
        names."""
        if self._pool is not None:
            await self._pool.start()
        for tool in self._tools.values():
            if not tool.isolated:
                await asyncio.to_thread(tool.warm)
        for server in self._servers:
            for described in await server.connect():
                name = described["function"]["name"]
                if name in self._tools or name in self._served:
                    raise ConfigError(
                        f"workflow.tools: two tools are named {name!r}; choose tools of the server with `only`"
                    )
                self._served[name] = server
                self._schemas.append(dict(described))

    async def call(self, call: ToolCall) -> Result:
        """Make one call. Raises `IsolationError` if no process or sandbox can be created for it."""
        if call.error is not None:
            return Result(text=f"error: {call.error}", is_error=True)
        if call.name in self._served:
            return await self._call_server(self._served[call.name], call)
        if call.name not in self._tools:
            return Result(text=f"error: there is no tool {call.name!r:.80}; there are {self._names()}", is_error=True)
        with LEDGER.enter(f"tool {call.name}", self._limits.timeout_s):
            answer = await self._run(self._tools[call.name], call)
        if answer.failed is not None or not isinstance(answer.value, list) or len(answer.value) != 2:
            return Result(text=f"error: {answer.failed or 'the answer cannot be read'}", is_error=True)
        went_well, text = answer.value
        return Result(text=self._shorten(str(text)), is_error=went_well is not True)

    async def _call_server(self, server: ToolServer, call: ToolCall) -> Result:
        try:
            text = await asyncio.wait_for(server.call(call.name, call.arguments), self._limits.timeout_s)
        except TimeoutError:
            limit = f"no answer within call_timeout_s = {self._limits.timeout_s:g}"
            return Result(text=f"error: {limit}", is_error=True)
        except ToolError as error:
            return Result(text=self._shorten(f"error: {error}"), is_error=True)
        return Result(text=self._shorten(text))

    async def _run(self, tool: Tool, call: ToolCall) -> Answer:
        if tool.isolated and self._pool is not None:
            try:
                return await self._pool.call((call.name, dict(call.arguments)))
            except RaisedError as error:
                return Answer(failed=str(error))
        work = asyncio.to_thread(run_tool, tool, call.arguments)
        try:
            return Answer(value=await asyncio.wait_for(work, self._limits.timeout_s))
        except TimeoutError:
            return Answer(failed=f"no answer within call_timeout_s = {self._limits.timeout_s:g}")

    async def close(self) -> None:
        """End the worker processes and the connections to servers."""
        for server in self._servers:
            await server.disconnect()
        if self._pool is not None:
            self._pool.close()

    def _names(self) -> str:
        return ", ".join([*self._tools, *self._served])

    def _shorten(self, text: str) -> str:
        left = len(text) - self._max_chars
        return text if left <= 0 else f"{text[: self._max_chars]} ... ({left} characters left out)"


@dataclass(frozen=True, slots=True)
class ToolWork:
    """Worker side of a toolset."""

    tools: tuple[Tool, ...]

    def warm(self) -> None:
        """Open the tools."""
        for tool in self.tools:
            tool.warm()

    def prepare(self, given: tuple[str, dict[str, Any]]) -> None:
        """Do nothing: the policy's input is only handled inside the call."""

    def answer(self, given: tuple[str, dict[str, Any]]) -> list[Any]:
        """Make one call."""
        name, arguments = given
        return run_tool(
            next(tool for tool in self.tools if signatures.name_of(tool.implementation()) == name), arguments
        )


def run_tool(tool: Tool, arguments: Mapping[str, Any]) -> list[Any]:
    """Run a tool. Returns whether the call succeeded, and its result or its error as text."""
    function = tool.implementation()
    try:
        result = call(function, signatures.validate_arguments(signatures.arguments_of(function), arguments))
        return [True, result if isinstance(result, str) else json.dumps(result, default=str)]
    except ToolError as error:
        return [False, f"error: {error}"]
    except (MemoryError, IsolationError):
        raise
    except Exception as error:  # noqa: BLE001  boundary: tools are users' code, and the policy may learn from the error
        return [False, f"error: {one_line(error)}"]
