"""Servers that somebody else runs: attached, given weights from disk, never started or stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import EngineError

from .actor import EngineServer, Started
from .api import Api
from .exactness import others_mistakes
from .mail import Channel, Office
from .receiving import Commands
from .stream import Stream


class FolderCommands(Commands):
    """Does by the release's own call what `loader.py` does in servers that we start."""

    async def begin(self) -> None:
        """Nothing: files are taken over all at once."""

    async def end(self) -> None:
        """Nothing."""

    async def run(
        self,
        operation: str,
        *,
        timeout_s: float,
        weight_version: str | None = None,
        flush_cache: bool = False,
        **command: Any,
    ) -> list[dict[str, Any]]:
        """Checks what lies in the files, and has the server take them when all are there. Raises `SyncError`."""
        if operation != "take_over":
            raise EngineError(f"{self._api.url}: parameters of servers that others run cannot be read")
        stream = Stream(
            channel=Channel.of(self._office.address, command["token"], 0),
            load=lambda bucket: None,  # it is enough to have read it; the server does that again
            rank=0,
            device=torch.device("cpu"),
            timeout_s=timeout_s,
        )
        receipt = await asyncio.to_thread(stream.run)
        body = {"model_path": command["folder"], "weight_version": weight_version, "flush_cache": flush_cache}
        await self._api.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        return [receipt]


class ExternalServer(EngineServer):
    """What `EngineServer` is for servers of our own."""

    def __init__(self, url: str, model_path: Path, wanted: Mapping[str, Any]) -> None:
        self._name, self._url, self._model_path, self._wanted = url, url, model_path, wanted
        self._api = self._commands = self._update = None
        self._office = Office()

    async def start(self) -> Started:
        """Attach. Raises `EngineError` if the server has another model or cannot be updated."""
        await self._leave()
        self._api = api = Api(self._url)
        abilities = await api.abilities()
        await self._check_model(api)
        for line in others_mistakes(self._wanted, await api.info(), self._url):
            raise EngineError(line)
        if not abilities.has_disk_updates:
            raise EngineError(f"{self._url}: SGLang {abilities.release} cannot take weights from disk")
        # also the proof that we may: a server may ask for a key
        await api.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        self._commands = FolderCommands(api, abilities, self._office)
        return Started(url=self._url, abilities=abilities, office=self._office.address)

    async def _check_model(self, api: Api) -> None:
        served = await api.get("/model_info")
        own = json.loads((self._model_path / "config.json").read_text())
        for name in ("model_type", "architectures"):
            if name in served and served[name] != own.get(name):
                raise EngineError(
                    f"rollout.urls: {self._url} serves a model with {name} {served[name]!r}, "
                    f"model.path has {own.get(name)!r}"
                )

    async def _exit_code(self) -> int | None:
        return None

    async def kill(self) -> None:
        """It is not ours to end."""
        await self._leave()

    async def close(self) -> None:
        """Let go of it."""
        await self._leave()
