"""The server as a run sees it: an engine that serves, and whose weights nobody here can change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from plasmid.config.run import ModelConfig
from plasmid.errors import EngineError
from plasmid.protocols import PauseMode, SyncPlan
from plasmid.types import SyncReceipt
from plasmid.utils.addresses import shown_url

from .client import ServerClient, authorization
from .settings import NATIVE, Server, ServerApi

ANSWER_S = 30.0
"""Longest time for an answer about the server itself."""
MAX_NAME = 500
"""Characters of a model's name."""


class ServerEngine:
    """Implements `RolloutEngine` as far as evaluating and sampling need it."""

    pause_mode: PauseMode = "in_place"

    def __init__(self, client: ServerClient, url: str) -> None:
        self._client, self._url = client, url

    @property
    def client(self) -> ServerClient:
        """What rollout workers talk to."""
        return self._client

    def needs_weights(self) -> bool:
        return False

    async def expect(self, session_ids: Sequence[str]) -> None:
        """A server batches as it likes."""

    async def pause(self, mode: PauseMode) -> None:
        self._cannot("be paused")

    async def resume(self) -> None:
        """It never was paused."""

    async def plan_sync(self) -> SyncPlan:
        self._cannot("take weights")

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        self._cannot("take weights")

    async def checksum(self) -> Mapping[str, int]:
        self._cannot("show its weights")

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self._cannot("give up its memory")

    async def wake(self, *, kv_cache: bool = True) -> None:
        """It never slept."""

    async def health(self) -> None:
        """Raises `EngineError` if the server cannot be reached."""
        await _get(self._client, "/v1/models")

    async def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        await self._client.close()

    def _cannot(self, what: str) -> NoReturn:
        raise EngineError(f"rollout: the server at {self._url} cannot {what}: it is somebody else's")


async def connect(settings: Server, model: ModelConfig) -> ServerEngine:
    """Find out what the server speaks and serves. Raises `EngineError` if it cannot be reached."""
    authorization(settings.api_key_env)
    probe = ServerClient(settings, model, served="", api="completions")
    try:
        api: ServerApi = "completions"
        if settings.api == NATIVE or (settings.api == "auto" and await _get(probe, "/get_model_info", needed=False)):
            api = "generate"
        served = settings.model
        if api == "completions" and served == "auto":
            listed = await _get(probe, "/v1/models")
            try:
                served = str(listed["data"][0]["id"])[:MAX_NAME]
            except (KeyError, IndexError, TypeError):
                raise EngineError(
                    f"rollout.url: {shown_url(settings.url)} lists no model; name one with rollout.model"
                ) from None
    finally:
        await probe.close()
    return ServerEngine(ServerClient(settings, model, served=served, api=api), shown_url(settings.url))


async def _get(client: ServerClient, path: str, *, needed: bool = True) -> Any:
    """The JSON at the path; None if the server has none there and it is not ``needed``."""
    url, answer = client.json.shown, await client.json.ask("GET", path, limit_s=ANSWER_S)
    if answer.error and not answer.status:
        raise EngineError(f"rollout.url: cannot reach {url}: {answer.error}")
    if answer.error and needed:
        raise EngineError(
            f"rollout.url: {url}{path} answered {answer.status}, so this is no OpenAI-compatible server; see that the "
            "address is right, and rollout.api_key_env if it wants a key"
        )
    return answer.value
