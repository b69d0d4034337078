"""Base class of rewards that query a server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from plasmid import Reward, RunContext, Score
from plasmid.components import Settings, kind_of
from plasmid.errors import RewardError
from plasmid.utils import json_client
from plasmid.utils.addresses import validate_web_address
from plasmid.utils.json_client import JsonClient, RequestOptions, ServerFailure
from pydantic import AfterValidator, Field, PrivateAttr

from ..extras import import_extra


class ServerSettings(Settings):
    """Settings of the HTTP client."""

    headers: Mapping[str, str] = Field(default_factory=dict)
    """Headers of every request. Not for secrets, because they are saved in the run folder."""
    api_key_env: str = ""
    """Environment variable with the key, which is sent as ``Authorization: Bearer``, or with a complete ``Basic
    ...`` value; empty for none."""
    request_timeout_s: float = Field(30.0, gt=0)
    """Time limit for one request, in seconds, from connecting to the last byte of the answer."""
    max_answer_kb: int = Field(1024, ge=1)
    """Maximum size of an answer, in KiB, also after decompression."""
    attempts: int = Field(5, ge=1)
    """Maximum number of attempts. Errors that a retry cannot fix are not retried."""
    backoff_s: float = Field(0.5, gt=0)
    """Maximum pause before the second attempt, in seconds; doubles with every further attempt. The actual pause is
    drawn uniformly between 0 and this maximum."""
    max_backoff_s: float = Field(20.0, gt=0)
    """Upper bound of the pause between attempts, in seconds."""
    connections: int = Field(64, ge=1)
    """Maximum number of concurrent requests."""
    breaker_failures: int = Field(10, ge=1)
    """Number of consecutive failures after which the circuit breaker stops sending requests."""
    breaker_pause_s: float = Field(30.0, gt=0)
    """Time that the circuit breaker stays open, in seconds, before one request is tried."""


class Client(JsonClient):
    """Client of one server. Counts consecutive failures over all requests."""

    def __init__(self, url: str, settings: ServerSettings, *, kind: str) -> None:
        options = RequestOptions(
            attempts=settings.attempts,
            backoff_s=settings.backoff_s,
            max_backoff_s=settings.max_backoff_s,
            request_timeout_s=settings.request_timeout_s,
            connections=settings.connections,
            max_bytes=settings.max_answer_kb << 10,
        )
        super().__init__(
            url,
            options,
            headers=lambda: {**settings.headers, **authorization(settings.api_key_env, kind)},
            library=partial(import_extra, "httpx", extra="http", kind=kind),
        )
        self._settings = settings
        self._failures = 0
        self._closed_until = 0.0

    def state(self) -> dict[str, float]:
        """Return consecutive failures and the remaining pause in seconds; empty if the last request succeeded."""
        pause_s = max(0.0, self._closed_until - time.monotonic())
        return {"failures": self._failures, "pause_s": pause_s} if self._failures else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self._failures = int(state["failures"])
        self._closed_until = time.monotonic() + state["pause_s"]

    def before_attempt(self) -> None:
        if self._failures < self._settings.breaker_failures:
            return
        now = time.monotonic()
        if now < self._closed_until:
            raise ServerFailure(f"{self.shown} failed {self._failures} times in a row; no request was sent")
        self._closed_until = now + self._settings.breaker_pause_s  # this request is the trial

    def after_attempt(self, *, failed: bool) -> None:
        self._failures = self._failures + 1 if failed else 0
        if failed and self._failures >= self._settings.breaker_failures:
            self._closed_until = time.monotonic() + self._settings.breaker_pause_s


def authorization(variable: str, kind: str) -> dict[str, str]:
    """Return the header with the key. Raises `RewardError` if the variable is not set."""
    if not variable:
        return {}
    if not os.environ.get(variable):
        raise RewardError(f"{kind}: server.api_key_env = {variable!r} is not set in the environment")
    return json_client.authorization(os.environ[variable])


class WebReward(Reward):
    """Queries a server."""

    url: Annotated[str, AfterValidator(validate_web_address)]
    """URL of the server."""
    timeout_s: float = Field(600.0, gt=0)
    """Time limit for one sample, in seconds, including retries but not the wait for a free connection. Beyond it the
    request counts as failed and `on_failure` applies."""
    server: ServerSettings = ServerSettings()
    """Settings of the HTTP client."""
    on_failure: Literal["value", "error"] = "error"
    """Behavior if the server gives no usable answer: end the run (``error``), or use `failure_value` (``value``)."""
    failure_value: float = Field(0.0, allow_inf_nan=False)
    """Value of a sample that the server could not judge, with ``on_failure = "value"``."""
    _client: Client | None = PrivateAttr(None)

    def packages(self) -> Mapping[str, str]:
        return {"httpx": "plasmid-rewards[http]"}

    def lacks(self) -> Iterator[str]:
        yield from super().lacks()
        if self.server.api_key_env and not os.environ.get(self.server.api_key_env):
            yield f"server.api_key_env: {self.server.api_key_env} is not set in the environment"

    async def open(self, context: RunContext) -> None:
        authorization(self.server.api_key_env, kind_of(self))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def state(self) -> Mapping[str, Any]:
        breaker = {} if self._client is None else self._client.state()
        return {"breaker": breaker} if breaker else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        if "breaker" in state:
            self.client().restore(state["breaker"])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        breakers = [state["breaker"] for state in states if "breaker" in state]
        return {"breaker": max(breakers, key=lambda breaker: float(breaker["failures"]))} if breakers else {}

    def address(self) -> str:
        """Return the URL of requests."""
        return self.url

    def client(self) -> Client:
        """Return the client, created on first use."""
        if self._client is None:
            self._client = Client(self.address(), self.server, kind=kind_of(self))
        return self._client

    def failure(self) -> float:
        return self.failure_value

    def on_timeout(self, message: str) -> Score:
        return self.failure_score(f"{self.client().shown}: no usable answer within timeout_s = {self.timeout_s:g}")

    def failure_score(self, reason: ServerFailure | str) -> Score:
        """Return a score with the failure value, or raise `RewardError`, depending on `on_failure`."""
        if self.on_failure == "error":
            raise RewardError(
                f"{kind_of(self)}: {reason}; check that the server is running, or set on_failure = 'value' to continue "
                "without it"
            )
        return Score(value=self.failure_value, components={"failed": 1.0}, error=str(reason))
