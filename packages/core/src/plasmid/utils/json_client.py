"""JSON from HTTP servers that are not trusted: total deadlines, bounded answers, no redirects, attempts."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .addresses import shown_url
from .work_clock import queued

AGAIN = {408, 425, 429, 500, 502, 503, 504, 529}
"""Answers after which asking again may help."""
DEFLATED = {"gzip", "x-gzip", "deflate"}
SHOWN_BYTES = 200
"""Of an answer that is an error."""


class ServerFailure(Exception):
    """The server gave no usable answer. Says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a server is asked."""

    attempts: int
    backoff_s: float
    """Pause before the second attempt, doubled for each one more; the real pause is drawn between 0 and that."""
    max_backoff_s: float
    request_timeout_s: float | None = None
    """Longest time for one attempt, from the connection to the last byte; None leaves it to the caller."""
    connect_timeout_s: float | None = None
    connections: int | None = None
    """Requests at one time; waiting for a free connection is no work of the sample's (`work_clock`)."""
    max_bytes: int = 1 << 20
    """Largest answer, compressed and decompressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one attempt."""

    value: Any = None
    error: str = ""
    """Why there is no value; empty if there is one."""
    status: int = 0
    """Of the answer; 0 if none came."""
    again: bool = False
    """Another attempt may help."""


class JsonClient:
    """One server. Opens its connections on the event loop that asks."""

    def __init__(
        self, url: str, asking: Asking, *, headers: Callable[[], Mapping[str, str]], library: Callable[[], Any]
    ) -> None:
        """``library`` imports httpx, or says how to install it."""
        self._url, self._asking, self._headers, self._library = url, asking, headers, library
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: Any = None
        self._free = asyncio.Semaphore(asking.connections or 1)

    @property
    def shown(self) -> str:
        """The address for messages."""
        return shown_url(self._url)

    async def post(self, payload: Any, *, path: str = "", max_bytes: int | None = None) -> Any:
        """The JSON that the server answers with. Raises `ServerFailure`."""
        answer = Answer()
        for attempt in range(self._asking.attempts):
            if attempt:
                longest = min(self._asking.max_backoff_s, self._asking.backoff_s * 2 ** min(attempt - 1, 60))
                await asyncio.sleep(random.uniform(0, longest))
            self.before_attempt()
            answer = await self.ask("POST", path, payload, max_bytes=max_bytes)
            self.after_attempt(failed=bool(answer.error))
            if not answer.error:
                return answer.value
            if not answer.again:
                break
        raise ServerFailure(self.described(path, answer.error))

    def before_attempt(self) -> None:
        """Called before each attempt. Raises `ServerFailure` to make none."""

    def after_attempt(self, *, failed: bool) -> None:
        """Called after each attempt."""

    async def ask(
        self, method: str, path: str, payload: Any = None, *, max_bytes: int | None = None, limit_s: float | None = None
    ) -> Answer:
        """One attempt."""
        self._opened()
        if self._asking.connections is None:
            return await self._ask(method, path, payload, max_bytes, limit_s)
        with queued():
            await self._free.acquire()
        try:
            return await self._ask(method, path, payload, max_bytes, limit_s)
        finally:
            self._free.release()

    async def _ask(self, method: str, path: str, payload: Any, max_bytes: int | None, limit_s: float | None) -> Answer:
        httpx = self._library()
        limit_s, most = limit_s or self._asking.request_timeout_s, max_bytes or self._asking.max_bytes
        try:
            body = None if payload is None else json.dumps(payload, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return Answer(error="the request cannot be JSON")
        status = 0
        try:
            async with asyncio.timeout(limit_s):
                async with self._opened().stream(method, f"{self._url}{path}", content=body) as response:
                    status = response.status_code
                    data = await _beginning(response) if status != 200 else await _read(response, most)
            if status == 200:
                return Answer(value=json.loads(data), status=status)
            return Answer(
                error=f"answered {status}: {data.decode(errors='replace')!r}", status=status, again=status in AGAIN
            )
        except TimeoutError:
            return Answer(error=f"ReadTimeout no whole answer within {limit_s:g} s", again=True)
        except UnreadableError as error:
            return Answer(error=str(error), status=status)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = " ".join(str(error).split())[:SHOWN_BYTES].replace(self._url, self.shown)
            return Answer(error=f"{type(error).__name__} {what}".rstrip(), again=True)
        except (ValueError, RecursionError, zlib.error):
            return Answer(error="the answer is no JSON", status=status, again=True)

    def described(self, path: str, reason: str) -> str:
        """A reason with the address."""
        return f"{self.shown}{path}{' ' if reason.startswith('answered') else ': '}{reason}"

    async def close(self) -> None:
        """Close the connections of this loop."""
        if self._http is not None and self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._http = None

    def _opened(self) -> Any:
        """Connections of the running loop."""
        httpx, loop = self._library(), asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request with its whole address
            timeout = httpx.Timeout(None, connect=self._asking.connect_timeout_s)  # a deadline is the attempt's
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            headers = {
                "Accept": "application/json",
                "Accept-Encoding": "identity",
                "Content-Type": "application/json",
                **self._headers(),
            }
            self._http = httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers, follow_redirects=False)
            self._loop, self._free = loop, asyncio.Semaphore(self._asking.connections or 1)
        return self._http


class UnreadableError(Exception):
    """The answer has more bytes than it may have, or is encoded in a way that was not asked for."""


async def _read(response: Any, max_bytes: int) -> bytes:
    """The body, decompressed. Reads no more than ``max_bytes``, before and after decompression."""
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in DEFLATED | {"identity", ""}:
        raise UnreadableError(f"the answer is encoded as {coding[:40]!r}, which was not asked for")
    inflate = zlib.decompressobj(zlib.MAX_WBITS | 32) if coding in DEFLATED else None
    data, received = bytearray(), 0
    async for chunk in response.aiter_raw():
        received += len(chunk)
        data += inflate.decompress(chunk, max_bytes + 1 - len(data)) if inflate is not None else chunk
        if max(received, len(data)) > max_bytes:
            raise UnreadableError(f"the answer has more than {max_bytes} bytes")
    return bytes(data)


async def _beginning(response: Any) -> bytes:
    """The first bytes of an answer that is an error."""
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) >= SHOWN_BYTES:
            break
    return bytes(data[:SHOWN_BYTES])


def authorization(key: str) -> dict[str, str]:
    """The header with a key: a bearer's, unless the key says its scheme itself (``Basic ...``)."""
    return {"Authorization": key if " " in key.strip() else f"Bearer {key}"}
