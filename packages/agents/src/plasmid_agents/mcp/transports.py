"""Transports to an MCP server: the standard streams of a program, or streamable HTTP.

The server is untrusted: message sizes are limited, and anything that does not answer a request is dropped. The official
client limits neither, and depends on a web server and cryptography.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol

from plasmid.errors import one_line

from ..launch.commands import SupervisedProcess

Message = dict[str, Any]
MAX_FILE = 1 << 30
"""Maximum size of a file that a server's program may write, in bytes."""


class ServerLostError(Exception):
    """The connection ended, or received something other than MCP. The message says which of these."""


class Transport(Protocol):
    """One connection."""

    async def request(self, message: Message) -> Message:
        """Send a request and wait for its answer. Raises `ServerLostError`."""

    async def notify(self, message: Message) -> None:
        """Send a message without an answer. Raises `ServerLostError`."""

    async def close(self) -> None:
        """Close the connection."""


class ProgramTransport:
    """A local server process, with one JSON message per line."""

    def __init__(self, program: SupervisedProcess) -> None:
        self._program, self._process = program, program.process
        self._waiting: dict[Any, asyncio.Future[Message]] = {}
        self._lost = ""
        self._reading = asyncio.create_task(self._read())

    @staticmethod
    async def start(command: tuple[str, ...], environment: Mapping[str, str], *, max_bytes: int) -> ProgramTransport:
        """Start the program; its child processes end with it. Raises `OSError`."""
        program = await SupervisedProcess.start(
            command,
            max_file_bytes=MAX_FILE,
            confined=True,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(environment),
            limit=max_bytes,
        )
        return ProgramTransport(program)

    async def request(self, message: Message) -> Message:
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[message["id"]] = answer
        try:
            await self.notify(message)
            return await answer
        finally:
            self._waiting.pop(message["id"], None)

    async def notify(self, message: Message) -> None:
        if self._lost:
            raise ServerLostError(self._lost)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            raise ServerLostError("the program has ended") from None

    async def _read(self) -> None:
        assert self._process.stdout is not None
        why = "the program has ended"
        try:
            while line := await self._process.stdout.readline():
                message = json.loads(line)
                if isinstance(message, dict) and "method" not in message:
                    waiting = self._waiting.get(message.get("id"))
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
        except (ValueError, TypeError, RecursionError) as error:
            why = f"cannot read a message: {one_line(error)}"
        self._lost = why
        await self._program.end()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ServerLostError(why))

    async def close(self) -> None:
        self._program.stop()
        await asyncio.gather(self._reading, return_exceptions=True)


class HttpTransport:
    """A server at a URL; answers are JSON or a stream of events."""

    def __init__(self, url: str, headers: Mapping[str, str], *, max_bytes: int) -> None:
        import aiohttp  # lets settings be read without it

        self._url, self._max_bytes, self._errors = url, max_bytes, (aiohttp.ClientError, OSError)
        self._headers = {
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
            **headers,
        }
        timeout = aiohttp.ClientTimeout(total=None, connect=30.0)
        self._client = aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 16, trust_env=False)

    async def request(self, message: Message) -> Message:
        for found in await self._post(message):
            if isinstance(found, dict) and found.get("id") == message["id"] and "method" not in found:
                return found
        raise ServerLostError("the server did not answer")

    async def notify(self, message: Message) -> None:
        await self._post(message)

    async def _post(self, message: Message) -> list[Any]:
        body = json.dumps(message, default=str)
        try:
            async with self._client.post(self._url, data=body, headers=self._headers, allow_redirects=False) as answer:
                if answer.status >= 300:
                    raise ServerLostError(f"the server answered with status {answer.status}")
                if session := answer.headers.get("mcp-session-id"):
                    self._headers["mcp-session-id"] = session
                content = bytearray()
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > self._max_bytes:
                        raise ServerLostError(f"a message has more than {self._max_bytes} bytes")
                    if answer.content_type == "text/event-stream" and _is_answered(content, message):
                        break
                return _events(content) if answer.content_type == "text/event-stream" else _parse_body(content)
        except (ValueError, RecursionError) as error:
            raise ServerLostError(f"cannot read a message: {one_line(error)}") from None
        except self._errors as error:
            raise ServerLostError(one_line(error)) from None

    async def close(self) -> None:
        await self._client.close()


def _parse_body(content: bytes | bytearray) -> list[Any]:
    return [json.loads(content)] if content.strip() else []


def _events(content: bytes | bytearray) -> list[Any]:
    """Return the messages of complete events."""
    complete = content.decode().replace("\r\n", "\n").rpartition("\n\n")[0]
    found: list[Any] = []
    for event in complete.split("\n\n"):
        lines = [line.removeprefix("data:").strip() for line in event.split("\n") if line.startswith("data:")]
        if any(lines):
            found.append(json.loads("\n".join(lines)))
    return found


def _is_answered(content: bytearray, message: Message) -> bool:
    """Return whether the stream contains the answer; servers may leave the stream open."""
    if not content.endswith((b"\n\n", b"\r\n\r\n")):
        return False
    return any(isinstance(found, dict) and found.get("id") == message.get("id") for found in _events(content))
