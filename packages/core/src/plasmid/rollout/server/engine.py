"""The server as a run sees it: an engine that serves, and whose weights nobody here can change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from ...config import ModelConfig
from ...errors import EngineError, one_line
from ...protocols import PauseMode, SyncPlan
from ...types import SyncReceipt
from .client import ServerClient, authorization, library
from .settings import Server


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
        await _get(self._client, self._url, "/v1/models")

    async def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        await self._client.close()

    def _cannot(self, what: str) -> NoReturn:
        raise EngineError(f"rollout: the server at {self._url} cannot {what}: it is somebody else's")


async def connect(settings: Server, model: ModelConfig) -> ServerEngine:
    """Find out what the server speaks and serves. Raises `EngineError` if it cannot be reached."""
    authorization(settings.api_key_env)
    library()
    api: Literal["sglang", "openai"]
    probe = ServerClient(settings, model, served="", api="openai")
    try:
        if settings.api == "auto":
            api = "sglang" if await _get(probe, settings.url, "/get_model_info", needed=False) else "openai"
        else:
            api = settings.api
        served = settings.model
        if api == "openai" and served == "auto":
            listed = await _get(probe, settings.url, "/v1/models")
            try:
                served = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise EngineError(f"rollout.url: {settings.url} lists no model; name one with rollout.model") from None
    finally:
        await probe.close()
    return ServerEngine(ServerClient(settings, model, served=served, api=api), settings.url)


async def _get(client: ServerClient, url: str, path: str, *, needed: bool = True) -> Any:
    """The JSON at the path; None if the server has none there and it is not ``needed``."""
    try:
        response = await client.http().get(f"{url}{path}", timeout=30.0)
    except Exception as error:  # boundary: whatever a connection may fail with
        raise EngineError(f"rollout.url: cannot reach {url}: {one_line(error)}") from error
    try:
        return response.json() if response.status_code == 200 else _refused(url, path, response.status_code, needed)
    except ValueError:
        return _refused(url, path, response.status_code, needed)


def _refused(url: str, path: str, status: int, needed: bool) -> None:
    if needed:
        raise EngineError(
            f"rollout.url: {url}{path} answered {status}, so this is no OpenAI-compatible server; see that the address "
            "is right, and rollout.api_key_env if it wants a key"
        )
