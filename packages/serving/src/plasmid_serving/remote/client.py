"""Asks the server: connections, attempts, deadlines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any, Literal

from plasmid.config.run import ModelConfig
from plasmid.errors import ConfigError, one_line
from plasmid.types import Completion, GenerateRequest, StopReason
from plasmid.utils import json_client
from plasmid.utils.json_client import Asking, JsonClient, ServerFailure
from plasmid_models.tokenization.tokenizer import Tokenizer

from .apis import Api, CompletionsApi, GenerateApi, failed
from .settings import Server, ServerApi

LONGEST_PAUSE_S = 20.0
LEAST_BYTES = 1 << 20
"""Of an answer, however short the completion may be."""
BYTES_PER_TOKEN = 1024
"""Of an answer with tokens and log-probabilities, generously."""


class ServerClient:
    """Implements `EngineClient`. Picklable: connections are opened where it is used."""

    def __init__(self, settings: Server, model: ModelConfig, *, served: str, api: ServerApi) -> None:
        """``served`` is the model's name in requests."""
        self._settings, self._model, self._served, self._api_name = settings, model, served, api
        self.json = EngineServer(settings)
        self._running: dict[str, asyncio.Task[Completion]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ServerClient, served=self._served, api=self._api_name), (self._settings, self._model)

    @cached_property
    def _api(self) -> Api:
        if self._api_name == "generate":
            return GenerateApi()
        tokenizer = Tokenizer.of(self._model)
        spell = None
        if self._settings.prompt == "text":
            spell = partial(tokenizer.decode, keep_special=True)
        return CompletionsApi(self._served, encode=tokenizer.encode, spell=spell)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue the tokens. What the server does not answer in time, or refuses, is a completion with an error."""
        task = asyncio.create_task(self._ask(request))
        self._running[request.id] = task
        try:
            return await asyncio.wait_for(task, request.deadline_s)
        except TimeoutError:
            return failed(request, f"{self.json.shown} gave no answer within {request.deadline_s:g} s")
        except asyncio.CancelledError:
            if request.id in self._running:  # whoever waits has gone, and not `abort` ended the request
                raise
            return replace(failed(request, ""), stop_reason=StopReason.ABORT, error=None)
        finally:
            self._running.pop(request.id, None)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests early. What the server has drawn of them is not known here."""
        for id_ in list(self._running) if request_ids == "all" else request_ids:
            task = self._running.pop(id_, None)
            if task is not None:
                task.cancel()

    async def leave(self, session_ids: Sequence[str]) -> None:
        """Nobody needs to know."""

    async def close(self) -> None:
        """Close the connections of this loop."""
        await self.json.close()

    async def _ask(self, request: GenerateRequest) -> Completion:
        try:
            most = LEAST_BYTES + request.sampling.max_new_tokens * BYTES_PER_TOKEN
            answer = await self.json.post(self._api.payload(request), path=self._api.path, max_bytes=most)
            return self._api.completion(request, answer)
        except ServerFailure as error:
            return failed(request, str(error))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            reason = f"not the answer of a server of this kind: {one_line(error)}"
            return failed(request, self.json.described(self._api.path, reason))


class EngineServer(JsonClient):
    """The server, asked for JSON."""

    def __init__(self, settings: Server) -> None:
        asking = Asking(
            attempts=settings.attempts,
            backoff_s=settings.backoff_s,
            max_backoff_s=LONGEST_PAUSE_S,
            connect_timeout_s=settings.connect_timeout_s,
            max_bytes=LEAST_BYTES,
        )
        super().__init__(
            settings.url,
            asking,
            headers=lambda: authorization(settings.api_key_env),
            library=partial(import_module, "httpx"),
        )

    def described(self, path: str, reason: str) -> str:
        return f"{self.shown}{path}: {reason.removeprefix('answered ')}"


def authorization(variable: str) -> dict[str, str]:
    """The header with the key. Raises `ConfigError` if the variable is not set."""
    if not variable:
        return {}
    if not os.environ.get(variable):
        raise ConfigError(f"rollout.api_key_env: {variable} is not set in the environment")
    return json_client.authorization(os.environ[variable])
