"""The tools of a recipe, opened: each call in a process that is thrown away, its result as text for the policy."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plasmid.components.interaction import Tool, ToolError
from plasmid.errors import IsolationError, one_line
from plasmid_sandbox import Answer, Limits, WorkerPool

from . import signatures
from .tool_calls import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a call came to."""

    text: str
    is_error: bool = False


class Toolset:
    """Calls tools by name. Nothing that a policy writes raises here."""

    def __init__(self, tools: Sequence[Tool], limits: Limits, *, workers: int, max_chars: int) -> None:
        self._tools = {signatures.name_of(tool.implementation()): tool for tool in tools}
        self._limits, self._max_chars = limits, max_chars
        isolated = tuple(tool for tool in tools if tool.isolated)
        self._pool = WorkerPool(ToolWork(isolated), limits, workers=workers) if isolated else None

    def schemas(self) -> list[dict[str, Any]]:
        """What the policy is told of each tool."""
        return [signatures.schema(tool.implementation()) for tool in self._tools.values()]

    async def start(self) -> None:
        """Make the tools ready. Raises `IsolationError` if one cannot be."""
        if self._pool is not None:
            await self._pool.start()
        for tool in self._tools.values():
            if not tool.isolated:
                await asyncio.to_thread(tool.warm)

    async def call(self, call: ToolCall) -> Result:
        """Make one call."""
        if call.error is not None:
            return Result(text=f"error: {call.error}", is_error=True)
        if call.name not in self._tools:
            return Result(text=f"error: there is no tool {call.name!r:.80}; there are {self._names()}", is_error=True)
        answer = await self._run(self._tools[call.name], call)
        if answer.failed is not None or not isinstance(answer.value, list) or len(answer.value) != 2:
            return Result(text=f"error: {answer.failed or 'the answer cannot be read'}", is_error=True)
        went_well, text = answer.value
        return Result(text=self._shorten(str(text)), is_error=went_well is not True)

    async def _run(self, tool: Tool, call: ToolCall) -> Answer:
        if tool.isolated and self._pool is not None:
            try:
                return await self._pool.call((call.name, dict(call.arguments)))
            except IsolationError as error:
                return Answer(failed=str(error))
        work = asyncio.to_thread(run_tool, tool, call.arguments)
        try:
            return Answer(value=await asyncio.wait_for(work, self._limits.timeout_s))
        except TimeoutError:
            return Answer(failed=f"no answer within call_timeout_s = {self._limits.timeout_s:g}")

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def _names(self) -> str:
        return ", ".join(self._tools)

    def _shorten(self, text: str) -> str:
        left = len(text) - self._max_chars
        return text if left <= 0 else f"{text[: self._max_chars]} ... ({left} characters left out)"


@dataclass(frozen=True, slots=True)
class ToolWork:
    """What a worker process holds."""

    tools: tuple[Tool, ...]

    def warm(self) -> None:
        """Make the tools ready."""
        for tool in self.tools:
            tool.warm()

    def prepare(self, given: tuple[str, dict[str, Any]]) -> None:
        """Nothing: what a policy writes is met in the call alone."""

    def answer(self, given: tuple[str, dict[str, Any]]) -> list[Any]:
        """Make one call."""
        name, arguments = given
        return run_tool(
            next(tool for tool in self.tools if signatures.name_of(tool.implementation()) == name), arguments
        )


def run_tool(tool: Tool, arguments: Mapping[str, Any]) -> list[Any]:
    """Run a tool; whether the call went well, and its result or what it raised as text."""
    function = tool.implementation()
    try:
        result = function(**signatures.validate_arguments(signatures.arguments_of(function), arguments))
        if inspect.isawaitable(result):
            result = asyncio.run(_await_result(result))
        return [True, result if isinstance(result, str) else json.dumps(result, default=str)]
    except ToolError as error:
        return [False, f"error: {error}"]
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  boundary: tools are users' code, and the policy may learn from it
        return [False, f"error: {one_line(error)}"]


async def _await_result(result: Any) -> Any:
    return await result
