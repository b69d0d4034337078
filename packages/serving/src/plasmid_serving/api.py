"""HTTP calls to one server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from copy import copy
from typing import Any

import aiohttp
from plasmid.errors import EngineError, one_line
from plasmid.utils.addresses import shown_url

CONTROL_S = 120.0
"""Time limit of a control call that moves no weights."""
MAX_BYTES = 64 << 20
"""Largest answer of a control call."""


async def read_answer(reply: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read the body. Raises `EngineError` if it has more than ``max_bytes``."""
    data = bytearray()
    async for chunk in reply.content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise EngineError(f"{shown_url(str(reply.url))}: the answer has more than {max_bytes} bytes")
    return bytes(data)


class HttpApi:
    """Calls to one server. Connections belong to the event loop of the first call."""

    def __init__(self, url: str, key: str = "", *, timeout_s: float = CONTROL_S) -> None:
        """``key`` is the server's API key, if it wants one; ``timeout_s`` limits each call."""
        self.url, self.key, self._timeout_s = url.rstrip("/"), key, timeout_s
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Connections to the server, without a limit on their number or their time."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            # servers close connections that were idle for 5 s, which loses what is being sent on one at that moment
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, headers=headers
            )
        return self._session

    def limited(self, timeout_s: float) -> HttpApi:
        """Return a view on the same connections with another time limit of each call."""
        self.session()
        view = copy(self)
        view._timeout_s = timeout_s
        return view

    async def get(self, path: str) -> Any:
        """Return the JSON answer of a GET. Raises `EngineError`."""
        return await self.call("GET", path)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer of a POST, None for an empty one. Raises `EngineError` with the server's text."""
        return await self.call("POST", path, body or {})

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer of a call. Raises `EngineError`."""
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
            raise EngineError(f"{self.url}{path}: the answer is no JSON") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
