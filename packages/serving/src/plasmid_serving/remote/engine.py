"""Engine for an external server, whose weights cannot be changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from plasmid.components import kind_of
from plasmid.config.run import RunConfig
from plasmid.errors import EngineError
from plasmid.protocols import PauseMode, SyncPlan
from plasmid.types import SyncResult
from plasmid.utils.addresses import redact_url

from .apis import ServerApi
from .client import ServerClient
from .discovery import find_server, get
from .settings import Server


class ServerEngine:
    """Implements the parts of `RolloutEngine` that evaluation and sampling need."""

    pause_mode: PauseMode = "in_place"

    def __init__(self, settings: Server, client: ServerClient) -> None:
        self._settings, self._client = settings, client

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

    async def receive(self, plan: SyncPlan, version: int) -> SyncResult:
        self._refuse("receive weights")

    async def checksum(self) -> Mapping[str, int]:
        self._refuse("return checksums")

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self._refuse("release its memory")

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Do nothing: the server never sleeps."""

    async def health(self) -> None:
        """Raise `EngineError` if the server cannot be reached."""
        await get(self._settings, self._client.json, "/v1/models")

    async def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        await self._client.disconnect()

    def _refuse(self, what: str) -> NoReturn:
        url = redact_url(self._settings.url)
        raise EngineError(f"rollout: the server at {url} cannot {what}, because the run did not start it")


async def connect(settings: Server, config: RunConfig) -> ServerEngine:
    """Detect the server's API and its model. Raises `EngineError` if it cannot be reached."""
    api, served = await find_server(settings, config.plugins)
    _check_sampling(api, config)
    return ServerEngine(settings, ServerClient(settings, config.model, served=served, api=api))


def _check_sampling(api: ServerApi, config: RunConfig) -> None:
    for place, sampling in config.sampling_tables():
        if unsupported := [name for name in sampling.optional if name not in api.sampling_settings]:
            raise EngineError(
                f"{place}.{unsupported[0]}: the server's API {kind_of(api)!r} does not support it; remove it or set "
                "rollout.api"
            )
