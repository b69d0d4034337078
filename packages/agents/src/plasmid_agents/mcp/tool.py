"""The tool `mcp`: all tools of an MCP server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from plasmid.components import RecipeView
from plasmid.components.interaction import ToolError, ToolServer
from plasmid.errors import ConfigError
from plasmid.utils.child_environment import make_child_environment
from pydantic import Field, PrivateAttr

from ..launch.commands import find_search_path
from .transports import HttpTransport, Message, ProgramTransport, ServerLostError, Transport

VERSION = "2025-06-18"
"""Version of the protocol; servers answer with the version that they use."""
MAX_TOOLS = 128
MAX_PAGES = 32
MAX_SCHEMA = 32 << 10
"""Maximum size of a tool's description in bytes: the policy reads all of it in every prompt."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Mcp(ToolServer):
    """All tools of an MCP server, a program or a URL. The rollouts of a rollout worker share one connection."""

    kind: Literal["mcp"] = "mcp"
    command: tuple[str, ...] = ()
    """Program with arguments that speaks MCP over its standard streams."""
    url: str = ""
    """URL of a server that speaks MCP over streamable HTTP."""
    only: tuple[str, ...] = ()
    """Names of the tools to offer; empty for all of them."""
    environment: tuple[str, ...] = ()
    """Names of the run's environment variables to pass to the program, in addition to paths and the locale."""
    token: str = ""
    """Name of the environment variable with the bearer token for the URL."""
    start_timeout_s: float = Field(60.0, gt=0)
    """Time limit for starting the server and listing its tools, in seconds."""
    max_message_bytes: int = Field(4 << 20, ge=1024)
    """Maximum size of a message from the server, in bytes. A larger message closes the connection, which is then
    reopened."""

    _transport: Transport | None = PrivateAttr(None)
    _numbers: Iterator[int] = PrivateAttr(default_factory=itertools.count)
    _connecting: asyncio.Lock = PrivateAttr(default_factory=asyncio.Lock)

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if bool(self.command) == bool(self.url):
            yield 'set either command = ["program", "argument"] or url = "http://host/mcp"'
        if self.command and shutil.which(self.command[0], path=find_search_path()) is None:
            yield f"command: no such program: {self.command[0]}"
        if self.url and not self.url.startswith(("http://", "https://")):
            yield f"url must begin with http:// or https://, got {self.url!r}"

    async def connect(self) -> Sequence[Mapping[str, Any]]:
        for name in (*self.environment, *([self.token] if self.token else [])):
            if name not in os.environ:
                raise ConfigError(f"workflow.tools: {name} is not set in the environment of the run")
        try:
            return await asyncio.wait_for(self._list(), self.start_timeout_s)
        except (ServerLostError, ToolError, OSError) as error:
            raise ConfigError(f"workflow.tools: cannot use the MCP server {self._label}: {error}") from None
        except TimeoutError:
            raise ConfigError(
                f"workflow.tools: the MCP server {self._label} listed no tools within start_timeout_s = "
                f"{self.start_timeout_s:g}"
            ) from None

    @property
    def _label(self) -> str:
        return self.url or self.command[0]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            result = await self._call("tools/call", {"name": name, "arguments": dict(arguments)})
        except ServerLostError as error:
            raise ToolError(f"the server of the tool failed: {error}") from None
        text = "\n".join(_texts(result.get("content")))
        if not text and result.get("structuredContent") is not None:
            text = json.dumps(result["structuredContent"])
        if result.get("isError"):
            raise ToolError(text or "the tool failed")
        return text

    async def disconnect(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def _list(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        cursor: Any = None
        for _ in range(MAX_PAGES):
            result = await self._call("tools/list", {} if cursor is None else {"cursor": cursor})
            tools = result.get("tools")
            found += [_check_tool(tool) for tool in (tools if isinstance(tools, list) else [])]
            cursor = result.get("nextCursor")
            if cursor is None:
                break
        names = [tool["function"]["name"] for tool in found]
        if missing := sorted(set(self.only) - set(names)):
            raise ToolError(f"it has no tool {missing[0]!r}; it has {', '.join(names) or 'none'}")
        chosen = [tool for tool in found if not self.only or tool["function"]["name"] in self.only]
        if not 0 < len(chosen) <= MAX_TOOLS:
            raise ToolError(f"it offers {len(chosen)} tools, must be 1 to {MAX_TOOLS}; choose with `only`")
        return chosen

    async def _call(self, method: str, params: Message) -> Message:
        """Send a request, over a new connection if the last one was lost. Raises `ServerLostError`, `ToolError`."""
        async with self._connecting:
            if self._transport is None:
                self._transport = await self._open()
            transport = self._transport
        try:
            return await self._request(transport, method, params)
        except ServerLostError:
            if self._transport is transport:
                await self.disconnect()
            raise

    async def _open(self) -> Transport:
        transport: Transport
        if self.url:
            headers = {"authorization": f"Bearer {os.environ[self.token]}"} if self.token else {}
            transport = HttpTransport(self.url, headers, max_bytes=self.max_message_bytes)
        else:
            environment = {**make_child_environment(self.environment), "PATH": find_search_path()}
            transport = await ProgramTransport.start(self.command, environment, max_bytes=self.max_message_bytes)
        try:
            about = {"name": "plasmid", "version": "0.1.0"}
            await self._request(
                transport, "initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about}
            )
            await transport.notify({"jsonrpc": "2.0", "method": "notifications/initialized"})
        except BaseException:
            await transport.close()
            raise
        return transport

    async def _request(self, transport: Transport, method: str, params: Message) -> Message:
        number = next(self._numbers)
        answer = await transport.request({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        if isinstance(answer.get("result"), dict):
            return dict(answer["result"])
        error = answer.get("error")
        why = error.get("message") if isinstance(error, dict) else None
        raise ToolError(" ".join(str(why or "cannot read the server's answer").split())[:1000])


def _check_tool(tool: Any) -> Mapping[str, Any]:
    """Convert a tool to the form of chat templates. Raises `ToolError`."""
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ToolError(f"it offers a tool named {name!r:.80}; names are 1 to 64 letters, digits, '_', '.' and '-'")
    parameters = tool.get("inputSchema")
    function = {
        "name": name,
        "description": str(tool.get("description") or ""),
        "parameters": parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}},
    }
    if (size := len(json.dumps(function))) > MAX_SCHEMA:
        raise ToolError(
            f"its tool {name!r} has a description of {size} bytes, the maximum is {MAX_SCHEMA}; exclude it with `only`"
        )
    return {"type": "function", "function": function}


def _texts(content: Any) -> Iterator[str]:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") == "text":
            yield str(part.get("text", ""))
        elif isinstance(part, dict):
            yield f"({str(part.get('type'))[:40]} left out)"
