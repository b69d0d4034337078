"""Servers that somebody else runs: attached, given weights from disk, never started or stopped."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import EngineError

from .actor import Started
from .api import Abilities, Api
from .control import ControlChannel, ControlServer
from .exactness import others_mistakes
from .receiving import Commands
from .stream import Stream
from .transport import Transport
from .wire import Order


class FolderCommands(Commands):
    """Does by the release's own call what `loader.py` does in servers that we start."""

    async def begin(self) -> None:
        """Nothing: files are taken over all at once."""

    async def end(self) -> None:
        """Nothing."""

    async def take_over(self, order: Order, transport: Transport, version: int) -> list[dict[str, Any]]:
        """Checks what lies in the files, and has the server take them when all are there. Raises `SyncError`."""
        stream = Stream(
            channel=ControlChannel.of_process(self.control.address, order.token, 0),
            transport=transport,
            load=lambda bucket: None,  # it is enough to have read it; the server does that again
            rank=0,
            device=torch.device("cpu"),
            timeout_s=order.timeout_s,
        )
        receipt = await asyncio.to_thread(stream.run)
        body = {"model_path": str(order.folder), "weight_version": str(version), "flush_cache": order.flush_cache}
        await self._api.post("/update_weights_from_disk", body, timeout_s=order.timeout_s)
        return [receipt]

    async def checksums(self, timeout_s: float) -> Mapping[str, int]:
        """Never known. Raises `EngineError`."""
        raise EngineError(f"{self._api.url}: parameters of servers that others run cannot be read")


class ExternalServer:
    """What `EngineServer` is for servers of our own."""

    def __init__(self, url: str, api_key: str, model_path: Path, wanted: Mapping[str, Any]) -> None:
        self._url, self._key, self._model_path, self._wanted = url, api_key, model_path, wanted
        self._control = ControlServer(secrets.token_bytes(32))

    async def start(self) -> Started:
        """Attach. Raises `EngineError` if the server has another model or cannot be updated."""
        api = Api(self._url, self._key)
        try:
            abilities = await api.abilities()
            await self._check(api, abilities)
        finally:
            await api.close()
        return Started(url=self._url, abilities=abilities, control=self._control.address)

    async def _check(self, api: Api, abilities: Abilities) -> None:
        await self._check_model(api)
        for line in others_mistakes(self._wanted, await api.info(), self._url):
            raise EngineError(line)
        if not abilities.has_disk_updates:
            raise EngineError(f"{self._url}: SGLang {abilities.release} cannot take weights from disk")
        # also the proof that we may: a server may ask for another key here (admin_api_key)
        await api.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})

    async def _check_model(self, api: Api) -> None:
        served = await api.get("/model_info")
        own = json.loads((self._model_path / "config.json").read_text())
        for name in ("model_type", "architectures"):
            if name in served and served[name] != own.get(name):
                raise EngineError(
                    f"rollout.urls: {self._url} serves a model with {name} {served[name]!r}, "
                    f"model.path has {own.get(name)!r}"
                )

    async def exit_code(self) -> int | None:
        """Never known."""
        return None

    async def kill(self) -> None:
        """It is not ours to end."""
