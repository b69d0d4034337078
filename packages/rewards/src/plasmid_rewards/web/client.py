"""Asks a server for JSON, with a breaker that stops asking one that is down."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial

from plasmid.components import Settings
from plasmid.errors import RewardError
from plasmid.utils import json_client
from plasmid.utils.json_client import Asking as AskingServer
from plasmid.utils.json_client import JsonClient, ServerFailure
from pydantic import Field

from ..extras import import_extra


class ServerSettings(Settings):
    """How a server is asked."""

    headers: Mapping[str, str] = Field(default_factory=dict)
    """Headers of every request; not for secrets, since they are written beside the run."""
    api_key_env: str = ""
    """Environment variable with the key that is sent as ``Authorization: Bearer``, or with a whole ``Basic ...``; empty
    for none."""
    request_timeout_s: float = Field(30.0, gt=0)
    """Longest time for one request, from the connection to the last byte of the answer."""
    max_answer_kb: int = Field(1024, ge=1)
    """Largest answer in KiB, also after decompression."""
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


class Client(JsonClient):
    """One server. Counts its failures in a row over all requests."""

    def __init__(self, url: str, settings: ServerSettings, *, kind: str) -> None:
        asking = AskingServer(
            attempts=settings.attempts,
            backoff_s=settings.backoff_s,
            max_backoff_s=settings.max_backoff_s,
            request_timeout_s=settings.request_timeout_s,
            connections=settings.connections,
            max_bytes=settings.max_answer_kb << 10,
        )
        super().__init__(
            url,
            asking,
            headers=lambda: {**settings.headers, **authorization(settings.api_key_env, kind)},
            library=partial(import_extra, "httpx", extra="http", kind=kind),
        )
        self._settings = settings
        self._failures = 0
        self._closed_until = 0.0

    def state(self) -> dict[str, float]:
        """Failures in a row, and how long no more requests are sent; nothing while all is well."""
        pause_s = max(0.0, self._closed_until - time.monotonic())
        return {"failures": self._failures, "pause_s": pause_s} if self._failures else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take up what `state` gave."""
        self._failures = int(state["failures"])
        self._closed_until = time.monotonic() + state["pause_s"]

    def before_attempt(self) -> None:
        if self._failures < self._settings.breaker_failures:
            return
        now = time.monotonic()
        if now < self._closed_until:
            raise ServerFailure(f"{self.shown} failed {self._failures} times in a row; not asked again yet")
        self._closed_until = now + self._settings.breaker_pause_s  # this request is the one that tries

    def after_attempt(self, *, failed: bool) -> None:
        self._failures = self._failures + 1 if failed else 0
        if failed and self._failures >= self._settings.breaker_failures:
            self._closed_until = time.monotonic() + self._settings.breaker_pause_s


def authorization(variable: str, kind: str) -> dict[str, str]:
    """The header with the key. Raises `RewardError` if the variable is not set."""
    if not variable:
        return {}
    if not os.environ.get(variable):
        raise RewardError(f"{kind}: server.api_key_env = {variable!r} is not set in the environment")
    return json_client.authorization(os.environ[variable])
