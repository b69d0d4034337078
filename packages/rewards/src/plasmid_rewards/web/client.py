"""Asks a server for JSON: with deadlines, retries, and a breaker that stops asking one that is down."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from typing import Any

from plasmid.components import Settings
from plasmid.errors import RewardError
from pydantic import Field

from ..extras import needed

AGAIN = {408, 425, 429, 500, 502, 503, 504, 529}
"""Answers after which asking again may help."""


class ServerSettings(Settings):
    """How a server is asked."""

    headers: Mapping[str, str] = Field(default_factory=dict)
    """Headers of every request; not for secrets, since they are written beside the run."""
    api_key_env: str = ""
    """Environment variable with the key that is sent as ``Authorization: Bearer``; empty for none."""
    request_timeout_s: float = Field(30.0, gt=0)
    """Longest time for one request."""
    attempts: int = Field(5, ge=1)
    """How often to ask before giving up. Refusals that asking again does not change are not repeated."""
    backoff_s: float = Field(0.5, gt=0)
    """Pause before the second attempt, doubled for each one more; the real pause is drawn between 0 and that."""
    max_backoff_s: float = Field(20.0, gt=0)
    """Longest pause."""
    connections: int = Field(64, ge=1)
    """Requests at one time."""
    breaker_failures: int = Field(10, ge=1)
    """Requests in a row that may fail before no more are sent."""
    breaker_pause_s: float = Field(30.0, gt=0)
    """How long none are sent; one is then tried."""


class ServerFailure(Exception):
    """The server gave no usable answer. Says why."""


class Client:
    """One server. Counts its failures in a row over all requests; opens its connections on the loop that asks."""

    def __init__(self, url: str, settings: ServerSettings, *, kind: str) -> None:
        self._url, self._settings, self._kind = url, settings, kind
        self._failures = 0
        self._closed_until = 0.0
        self._random = random.Random()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: Any = None

    async def post(self, payload: Any) -> Any:
        """The JSON that the server answers with. Raises `ServerFailure`."""
        reason = ""
        for attempt in range(self._settings.attempts):
            if attempt:
                longest = min(self._settings.max_backoff_s, self._settings.backoff_s * 2 ** (attempt - 1))
                await asyncio.sleep(self._random.uniform(0, longest))
            self._check_breaker()
            answer, reason, again = await self._try(payload)
            self._count(failed=bool(reason))
            if not reason:
                return answer
            if not again:
                break
        raise ServerFailure(reason)

    def state(self) -> dict[str, float]:
        """Failures in a row, and how long no more requests are sent; nothing while all is well."""
        pause_s = max(0.0, self._closed_until - time.monotonic())
        return {"failures": self._failures, "pause_s": pause_s} if self._failures else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take up what `state` gave."""
        self._failures = int(state["failures"])
        self._closed_until = time.monotonic() + state["pause_s"]

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None and self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._http = None

    async def _try(self, payload: Any) -> tuple[Any, str, bool]:
        """The answer, or why there is none and whether to ask again."""
        httpx = needed("httpx", extra="http", kind=self._kind)
        try:
            response = await self._client(httpx).post(self._url, json=payload)
            if response.status_code != 200:
                again = response.status_code in AGAIN
                return None, f"{self._url} answered {response.status_code}: {response.text[:100]!r}", again
            return response.json(), "", False
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return None, f"{self._url}: {type(error).__name__} {error}".rstrip(), True
        except (ValueError, RecursionError):
            return None, f"{self._url}: the answer is no JSON", True

    def _client(self, httpx: Any) -> Any:
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            limits = httpx.Limits(max_connections=self._settings.connections)
            # waiting for a free connection is not the server's fault; the reward's own deadline bounds it
            timeout = httpx.Timeout(self._settings.request_timeout_s, pool=None)
            headers = {**self._settings.headers, **authorization(self._settings.api_key_env, self._kind)}
            self._http, self._loop = httpx.AsyncClient(limits=limits, timeout=timeout, headers=headers), loop
        return self._http

    def _check_breaker(self) -> None:
        if self._failures < self._settings.breaker_failures:
            return
        now = time.monotonic()
        if now < self._closed_until:
            raise ServerFailure(f"{self._url} failed {self._failures} times in a row; not asked again yet")
        self._closed_until = now + self._settings.breaker_pause_s  # this request is the one that tries

    def _count(self, *, failed: bool) -> None:
        self._failures = self._failures + 1 if failed else 0
        if failed and self._failures >= self._settings.breaker_failures:
            self._closed_until = time.monotonic() + self._settings.breaker_pause_s


def authorization(variable: str, kind: str) -> dict[str, str]:
    """The header with the key. Raises `RewardError` if the variable is not set."""
    if not variable:
        return {}
    if not os.environ.get(variable):
        raise RewardError(f"{kind}: server.api_key_env = {variable!r} is not set in the environment")
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def web_address(url: str) -> str:
    """The address, after checking that it is one."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"must begin with http:// or https://, got {url!r}")
    return url
