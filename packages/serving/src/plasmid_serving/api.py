"""HTTP calls to one server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import aiohttp
from plasmid.errors import EngineError, one_line
from plasmid.utils.addresses import redact_url

CONTROL_S = 120.0
"""Time limit of a control call that transfers no weights, in seconds."""
MAX_BYTES = 64 << 20
"""Maximum size of a control call's response, in bytes."""


async def read_answer(reply: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read the body. Raises `EngineError` if it exceeds ``max_bytes``."""
    data = bytearray()
    async for chunk in reply.content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise EngineError(f"{redact_url(str(reply.url))}: the answer has more than {max_bytes} bytes")
    return bytes(data)


def start_key(secret: str, start: str) -> str:
    """Return the API key of one start of a server.

    Every start has its own key, because another user could listen on the port of a server that has ended or has not
    bound it yet, and would then receive the server's key. That key opens neither other servers nor a later start.
    """
    return hmac.new(secret.encode(), start.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server, as used by rollout workers."""

    url: str
    start: str = ""
    """Random name of this start of the server; empty for an external server."""

    def key(self, secret: str) -> str:
        """Return its API key; ``secret`` is that of the run's own servers, or the key of external servers."""
        return start_key(secret, self.start) if self.start else secret

    def open(self, secret: str, *, timeout_s: float = CONTROL_S) -> HttpApi:
        """Return a client of the server, which sends the `key`."""
        return HttpApi(self.url, self.key(secret), timeout_s=timeout_s)


class HttpApi:
    """HTTP client of one server. Connections belong to the event loop of the first call."""

    def __init__(self, url: str, key: str = "", *, timeout_s: float = CONTROL_S) -> None:
        """``key`` is the server's API key, if it requires one; ``timeout_s`` limits each call."""
        self.url, self.key, self._timeout_s = url.rstrip("/"), key, timeout_s
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Return the session, without limits on the number or the duration of connections."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            # servers close connections after 5 s idle, which loses a request sent at that moment
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, headers=headers
            )
        return self._session

    def with_time_limit(self, timeout_s: float) -> HttpApi:
        """Return a view of the same connections with a different time limit per call."""
        self.session()
        view = copy(self)
        view._timeout_s = timeout_s
        return view

    async def get(self, path: str) -> Any:
        """Return the JSON response of a GET. Raises `EngineError`."""
        return await self.call("GET", path)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON response of a POST, None for an empty one. Raises `EngineError` with the server's message."""
        return await self.call("POST", path, body or {})

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON response of a call. Raises `EngineError`."""
        try:
            call = self.session().request(method, self.url + path, json=body, allow_redirects=False)
            async with asyncio.timeout(self._timeout_s), call as reply:
                data = await read_answer(reply, MAX_BYTES)
            if reply.status not in (200, 202):
                text = " ".join(data.decode(errors="replace").split())[:500]
                raise EngineError(f"{self.url}{path}: answered {reply.status}: {text}")
            return json.loads(data) if data.strip() else None
        except TimeoutError:
            raise EngineError(f"{self.url}{path}: no answer within {self._timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.url}{path}: {one_line(error)}") from None
        except (ValueError, RecursionError):
            raise EngineError(f"{self.url}{path}: the answer is not JSON") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
