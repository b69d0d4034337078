"""Client of an external server: connections, retries and deadlines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

from plasmid.config.run import ModelConfig
from plasmid.errors import ConfigError, one_line
from plasmid.types import Completion, GenerateRequest, StopReason
from plasmid.utils import json_client
from plasmid.utils.json_client import JsonClient, RequestOptions, ServerFailure

from .apis import ServedModel, ServerApi, failed_completion
from .settings import Server, ServerAccess

MAX_PAUSE_S = 20.0
INVALID = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""Errors raised when reading an invalid response."""
MIN_RESPONSE_LIMIT = 1 << 20
"""Minimum limit on the response size, in bytes, for short completions."""
BYTES_PER_TOKEN = 1024
"""Generous limit on the response size per token with its log-probability, in bytes."""


class ServerClient:
    """Implements `EngineClient`. Picklable: connections are opened where it is used."""

    def __init__(self, settings: Server, model: ModelConfig, *, served: str, api: ServerApi) -> None:
        """``served`` is the model's name in requests."""
        self._settings, self._model, self._api = settings, model, api
        self._served = ServedModel(served, model, prompt=settings.prompt)
        self.json = ServerConnection(settings)
        self._running: dict[str, asyncio.Task[Completion]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ServerClient, served=self._served.name, api=self._api), (self._settings, self._model)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue the tokens. A timeout or a refusal by the server becomes a completion with an error."""
        task = asyncio.create_task(self._send(request))
        self._running[request.id] = task
        try:
            return await asyncio.wait_for(task, request.deadline_s)
        except TimeoutError:
            return failed_completion(request, f"no answer from {self.json.shown} within {request.deadline_s:g} s")
        except asyncio.CancelledError:
            if request.id in self._running:  # the waiting task was cancelled, not the request aborted
                raise
            return replace(failed_completion(request, ""), stop_reason=StopReason.ABORT, error=None)
        finally:
            self._running.pop(request.id, None)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests early. Tokens that the server has generated for them are lost."""
        for id_ in list(self._running) if request_ids == "all" else request_ids:
            task = self._running.pop(id_, None)
            if task is not None:
                task.cancel()

    async def fetch_partial(self, request_ids: Sequence[str]) -> Sequence[Completion]:
        """Return empty completions: partial results of the server are not available."""
        return [Completion.without_tokens(id_) for id_ in request_ids]

    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """Do nothing: the server keeps no sessions."""

    async def disconnect(self) -> None:
        """Close the connections of this event loop."""
        await self.json.close()

    async def _send(self, request: GenerateRequest) -> Completion:
        try:
            most = MIN_RESPONSE_LIMIT + request.sampling.max_new_tokens * BYTES_PER_TOKEN
            answer = await self.json.post(self._api.payload(request, self._served), path=self._api.path, max_bytes=most)
            return self._api.completion(request, answer, self._served)
        except ServerFailure as error:
            return failed_completion(request, str(error))
        except INVALID as error:
            reason = f"not a valid answer: {one_line(error)}"
            return failed_completion(request, self.json.describe_error(self._api.path, reason))


class ServerConnection(JsonClient):
    """JSON client of the server."""

    def __init__(self, settings: ServerAccess) -> None:
        options = RequestOptions(
            attempts=settings.attempts,
            backoff_s=settings.backoff_s,
            max_backoff_s=MAX_PAUSE_S,
            connect_timeout_s=settings.connect_timeout_s,
            max_bytes=MIN_RESPONSE_LIMIT,
        )
        super().__init__(
            settings.url,
            options,
            headers=lambda: authorization(settings),
            library=partial(import_module, "httpx"),
        )

    def describe_error(self, path: str, reason: str) -> str:
        return f"{self.shown}{path}: {reason.removeprefix('answered ')}"


def authorization(settings: ServerAccess) -> dict[str, str]:
    """Return the header with the key. Raises `ConfigError` if the variable is not set."""
    if not (variable := settings.api_key_env):
        return {}
    if not os.environ.get(variable):
        raise ConfigError(f"{settings.table}.api_key_env: {variable} is not set in the environment")
    return json_client.authorization(os.environ[variable])
