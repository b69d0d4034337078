"""Engine for an external server, whose weights cannot be changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from plasmid.components import kind_of
from plasmid.config.run import RunConfig
from plasmid.errors import EngineError
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.protocols import PauseMode, SyncPlan
from plasmid.types import SyncReceipt
from plasmid.utils.addresses import shown_url

from .apis import CompletionsApi, ServerApi
from .client import ServerClient, authorization
from .settings import Server

ANSWER_S = 30.0
"""Time limit for requests about the server itself, in seconds."""
MAX_NAME = 500
"""Maximum length of a model name, in characters."""


class ServerEngine:
    """Implements the parts of `RolloutEngine` that evaluation and sampling need."""

    pause_mode: PauseMode = "in_place"

    def __init__(self, client: ServerClient, url: str) -> None:
        self._client, self._url = client, url

    @property
    def client(self) -> ServerClient:
        """Return the client for rollout workers."""
        return self._client

    def needs_weights(self) -> bool:
        return False

    async def expect(self, session_ids: Sequence[str]) -> None:
        """Do nothing: the server decides how it batches."""

    async def pause(self, mode: PauseMode) -> None:
        self._refuse("be paused")

    async def resume(self) -> None:
        """Do nothing: the server is never paused."""

    async def plan_sync(self) -> SyncPlan:
        self._refuse("receive weights")

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        self._refuse("receive weights")

    async def checksum(self) -> Mapping[str, int]:
        self._refuse("return checksums")

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self._refuse("release its memory")

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Do nothing: the server never sleeps."""

    async def health(self) -> None:
        """Raise `EngineError` if the server cannot be reached."""
        await _get(self._client, "/v1/models")

    async def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        await self._client.disconnect()

    def _refuse(self, what: str) -> NoReturn:
        raise EngineError(f"rollout: the server at {self._url} cannot {what}, because the run did not start it")


async def connect(settings: Server, config: RunConfig) -> ServerEngine:
    """Detect the server's API and its model. Raises `EngineError` if it cannot be reached."""
    authorization(settings.api_key_env)
    probe = ServerClient(settings, config.model, served="", api=CompletionsApi())
    try:
        api = await _find_api(probe, config.plugins) if settings.api == "auto" else settings.api
        _check_sampling(api, config)
        served = settings.model
        if api.names_model and served == "auto":
            listed = await _get(probe, "/v1/models")
            try:
                served = str(listed["data"][0]["id"])[:MAX_NAME]
            except (KeyError, IndexError, TypeError):
                raise EngineError(f"rollout.url: {shown_url(settings.url)} lists no model; set rollout.model") from None
    finally:
        await probe.disconnect()
    return ServerEngine(ServerClient(settings, config.model, served=served, api=api), shown_url(settings.url))


def _check_sampling(api: ServerApi, config: RunConfig) -> None:
    for place, sampling in config.sampling_tables():
        if unsupported := [name for name in sampling.optional if name not in api.sampling_settings]:
            raise EngineError(
                f"{place}.{unsupported[0]}: the server's API {kind_of(api)!r} does not support it; remove it or set "
                "rollout.api"
            )


async def _find_api(probe: ServerClient, plugins: Sequence[str]) -> ServerApi:
    """Return the installed API whose own path the server answers, or else OpenAI's."""
    for cls in find_components(load_plugins(files=map(Path, plugins)))["server_apis"].values():
        if issubclass(cls, ServerApi) and cls.probe and await _get(probe, cls.probe, needed=False):
            return cls()
    return CompletionsApi()


async def _get(client: ServerClient, path: str, *, needed: bool = True) -> Any:
    """Return the JSON at the path; None if it is missing and not ``needed``."""
    url, answer = client.json.shown, await client.json.ask("GET", path, limit_s=ANSWER_S)
    if answer.error and not answer.status:
        raise EngineError(f"rollout.url: cannot reach {url}: {answer.error}")
    if answer.error and needed:
        raise EngineError(
            f"rollout.url: {url}{path} returned status {answer.status}, so it is not an OpenAI-compatible server; "
            "check the URL, and set rollout.api_key_env if the server requires a key"
        )
    return answer.value
