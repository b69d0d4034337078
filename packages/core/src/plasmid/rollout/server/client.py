"""Asks the server: connections, attempts, deadlines."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from ...config import ModelConfig
from ...data.tokenizer import Tokenizer
from ...errors import ConfigError, EngineError, one_line
from ...types import Completion, GenerateRequest, StopReason
from .apis import Api, CompletionsApi, SGLangApi, failed
from .settings import Server

if TYPE_CHECKING:
    import httpx

AGAIN = {408, 425, 429, 500, 502, 503, 504, 529}
"""Answers after which asking again may help."""
LONGEST_PAUSE_S = 20.0


class Refused(Exception):
    """The server's answer is no completion. Says why."""


class ServerClient:
    """Implements `EngineClient`. Picklable: connections are opened where it is used."""

    def __init__(self, settings: Server, model: ModelConfig, *, served: str, api: Literal["sglang", "openai"]) -> None:
        """``served`` is the model's name in requests."""
        self._settings, self._model, self._served, self._kind = settings, model, served, api
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, asyncio.Task[Completion]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._settings, self._model, self._served, self._kind)

    @cached_property
    def _api(self) -> Api:
        if self._kind == "sglang":
            return SGLangApi()
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
            return failed(request, f"{self._settings.url} gave no answer within {request.deadline_s:g} s")
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
        if self._http is not None and self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._http = None

    async def _ask(self, request: GenerateRequest) -> Completion:
        payload, reason = self._api.payload(request), ""
        for attempt in range(self._settings.attempts):
            if attempt:
                longest = min(LONGEST_PAUSE_S, self._settings.backoff_s * 2 ** (attempt - 1))
                await asyncio.sleep(random.uniform(0, longest))
            answer, reason, again = await self._try(payload)
            if not reason:
                try:
                    return self._api.completion(request, answer)
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    reason, again = f"not the answer of a server of this kind: {one_line(error)}", False
            if not again:
                break
        return failed(request, f"{self._settings.url}{self._api.path}: {reason}")

    async def _try(self, payload: Any) -> tuple[Any, str, bool]:
        """The answer, or why there is none and whether to ask again."""
        httpx = library()
        try:
            response = await self.http().post(f"{self._settings.url}{self._api.path}", json=payload)
            if response.status_code != 200:
                return None, f"{response.status_code}: {response.text[:200]!r}", response.status_code in AGAIN
            return response.json(), "", False
        except httpx.HTTPError as error:
            return None, one_line(error), True
        except ValueError:
            return None, "the answer is no JSON", True

    def http(self) -> httpx.AsyncClient:
        """Connections of the running loop."""
        httpx = library()
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            timeout = httpx.Timeout(None, connect=self._settings.connect_timeout_s)  # a deadline is the request's
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            headers = authorization(self._settings.api_key_env)
            self._http, self._loop = httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers), loop
        return self._http


def authorization(variable: str) -> dict[str, str]:
    """The header with the key. Raises `ConfigError` if the variable is not set."""
    if not variable:
        return {}
    if not os.environ.get(variable):
        raise ConfigError(f"rollout.api_key_env: {variable} is not set in the environment")
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def library() -> Any:
    """The package httpx. Raises `EngineError` that says how to install it."""
    try:
        import httpx
    except ModuleNotFoundError:
        raise EngineError(
            "rollout: kind = 'server' needs the package httpx; pip install 'plasmid-core[http]'"
        ) from None
    return httpx


def _reopen(settings: Server, model: ModelConfig, served: str, api: Literal["sglang", "openai"]) -> ServerClient:
    return ServerClient(settings, model, served=served, api=api)
