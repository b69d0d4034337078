"""HTTP client for JSON from untrusted servers: total deadlines, bounded responses, no redirects, retries."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from .addresses import redact_url
from .work_clock import pause_work_clock

if TYPE_CHECKING:
    import ssl

RETRY_STATUS = {408, 425, 429, 500, 502, 503, 504, 529}
"""Status codes after which a request is retried."""
CERTIFICATES = "SSL_CERT_FILE", "SSL_CERT_DIR"
"""Environment variables that tell httpx where trusted certificates are."""
DEFLATED = {"gzip", "x-gzip", "deflate"}
SHOWN_BYTES = 200
"""Number of bytes of an error response to include in messages."""


class ServerFailure(Exception):
    """The server returned no usable response. The message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of the requests to a server."""

    attempts: int
    backoff_s: float
    """Maximum pause before the second attempt, in seconds, doubled for each further one. Pauses are random (full
    jitter)."""
    max_backoff_s: float
    request_timeout_s: float | None = None
    """Maximum duration of one attempt, from connecting to the last byte, in seconds; None leaves it to the caller."""
    connect_timeout_s: float | None = None
    connections: int | None = None
    """Maximum number of concurrent requests. Waiting for a connection does not count as work (`work_clock`)."""
    max_bytes: int = 1 << 20
    """Maximum size of a response, both compressed and decompressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of one attempt."""

    value: Any = None
    error: str = ""
    """Why there is no value; empty if there is one."""
    status: int = 0
    """HTTP status; 0 without a response."""
    may_retry: bool = False
    """True if another attempt may succeed."""


class JsonClient:
    """Client of one server. Opens connections on the event loop that calls it."""

    def __init__(
        self, url: str, options: RequestOptions, *, headers: Callable[[], Mapping[str, str]], library: Callable[[], Any]
    ) -> None:
        """``library`` imports httpx, or raises an error that explains how to install it."""
        self._url, self._options, self._headers, self._library = url, options, headers, library
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: Any = None
        self._free = asyncio.Semaphore(options.connections or 1)

    @property
    def shown(self) -> str:
        """Address for messages, without credentials."""
        return redact_url(self._url)

    async def post(self, payload: Any, *, path: str = "", max_bytes: int | None = None) -> Any:
        """Send a POST request with retries and return the JSON response. Raises `ServerFailure`."""
        answer = Answer()
        for attempt in range(self._options.attempts):
            if attempt:
                longest = min(self._options.max_backoff_s, self._options.backoff_s * 2 ** min(attempt - 1, 60))
                await asyncio.sleep(random.uniform(0, longest))
            self.before_attempt()
            answer = await self.send("POST", path, payload, max_bytes=max_bytes)
            self.after_attempt(failed=bool(answer.error))
            if not answer.error:
                return answer.value
            if not answer.may_retry:
                break
        raise ServerFailure(self.describe_error(path, answer.error))

    def before_attempt(self) -> None:
        """Called before each attempt. Can raise `ServerFailure` to prevent it."""

    def after_attempt(self, *, failed: bool) -> None:
        """Called after each attempt."""

    async def send(
        self, method: str, path: str, payload: Any = None, *, max_bytes: int | None = None, limit_s: float | None = None
    ) -> Answer:
        """Make one attempt. Does not raise; the result has the error."""
        self._open_connections()
        if self._options.connections is None:
            return await self._send(method, path, payload, max_bytes, limit_s)
        with pause_work_clock():
            await self._free.acquire()
        try:
            return await self._send(method, path, payload, max_bytes, limit_s)
        finally:
            self._free.release()

    async def _send(self, method: str, path: str, payload: Any, max_bytes: int | None, limit_s: float | None) -> Answer:
        httpx = self._library()
        limit_s, most = limit_s or self._options.request_timeout_s, max_bytes or self._options.max_bytes
        try:
            body = None if payload is None else json.dumps(payload, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return Answer(error="the request cannot be encoded as JSON")
        status = 0
        try:
            async with asyncio.timeout(limit_s):
                async with self._open_connections().stream(method, f"{self._url}{path}", content=body) as response:
                    status = response.status_code
                    data = await _read_beginning(response) if status != 200 else await _read(response, most)
            if status == 200:
                return Answer(value=json.loads(data), status=status)
            return Answer(
                error=f"answered {status}: {data.decode(errors='replace')!r}",
                status=status,
                may_retry=status in RETRY_STATUS,
            )
        except TimeoutError:
            return Answer(error=f"ReadTimeout no complete response within {limit_s:g} s", may_retry=True)
        except UnreadableError as error:
            return Answer(error=str(error), status=status)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = " ".join(str(error).split())[:SHOWN_BYTES].replace(self._url, self.shown)
            return Answer(error=f"{type(error).__name__} {what}".rstrip(), may_retry=True)
        except (ValueError, RecursionError, zlib.error):
            return Answer(error="the response is not JSON", status=status, may_retry=True)

    def describe_error(self, path: str, reason: str) -> str:
        """Prefix a reason with the address."""
        return f"{self.shown}{path}{' ' if reason.startswith('answered') else ': '}{reason}"

    async def close(self) -> None:
        """Close the connections of this loop."""
        if self._http is not None and self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._http = None

    def _open_connections(self) -> Any:
        """Return the connections of the running loop, opening them if needed."""
        httpx, loop = self._library(), asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs the complete URL of each request
            timeout = httpx.Timeout(None, connect=self._options.connect_timeout_s)  # `send` limits the whole attempt
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            headers = {
                "Accept": "application/json",
                "Accept-Encoding": "identity",
                "Content-Type": "application/json",
                **self._headers(),
            }
            tls = _ssl_context(*map(os.environ.get, CERTIFICATES))
            self._http = httpx.AsyncClient(
                timeout=timeout, limits=limits, headers=headers, follow_redirects=False, verify=tls
            )
            self._loop, self._free = loop, asyncio.Semaphore(self._options.connections or 1)
        return self._http


@cache
def _ssl_context(*certificates: str | None) -> ssl.SSLContext:
    """Return httpx's default TLS context, cached by the values of `CERTIFICATES`: creating one takes 25 ms."""
    import httpx

    return httpx.create_ssl_context()


class UnreadableError(Exception):
    """The response is too large, or has a content encoding that was not requested."""


async def _read(response: Any, max_bytes: int) -> bytes:
    """Read and decompress the body, at most ``max_bytes`` before and after decompression."""
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in DEFLATED | {"identity", ""}:
        raise UnreadableError(f"the response has the content encoding {coding[:40]!r}, which was not requested")
    inflate = zlib.decompressobj(zlib.MAX_WBITS | 32) if coding in DEFLATED else None
    data, received = bytearray(), 0
    async for chunk in response.aiter_raw():
        received += len(chunk)
        data += inflate.decompress(chunk, max_bytes + 1 - len(data)) if inflate is not None else chunk
        if max(received, len(data)) > max_bytes:
            raise UnreadableError(f"the response has more than {max_bytes} bytes")
    return bytes(data)


async def _read_beginning(response: Any) -> bytes:
    """Read the first bytes of an error response."""
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) >= SHOWN_BYTES:
            break
    return bytes(data[:SHOWN_BYTES])


def authorization(key: str) -> dict[str, str]:
    """Return the header for a key: a bearer token, unless the key includes a scheme (``Basic ...``)."""
    return {"Authorization": key if " " in key.strip() else f"Bearer {key}"}
