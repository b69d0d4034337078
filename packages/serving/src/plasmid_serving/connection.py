"""Connection of the engine to one running server: its HTTP API, in the server's dialect, and its control channel."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import EngineError, SyncError

from .api import HttpApi
from .dialect import Dialect, Load, ServerInfo
from .weights.command import UpdateCommand
from .weights.control import ControlAddress
from .weights.errors import decode_error
from .weights.receiver import Receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A server that answers."""

    url: str
    info: ServerInfo
    control: ControlAddress
    """Control channel of weight syncs."""


class ServerConnection:
    """The engine's calls to one server."""

    def __init__(self, dialect: Dialect, started: Started, api_key: str, *, is_attached: bool) -> None:
        """``is_attached``: the server belongs to others. It takes weights from files, and they cannot be read back."""
        self.dialect, self._key, self._is_attached = dialect, api_key, is_attached
        self.open(started)

    def open(self, started: Started) -> None:
        """Connect to the server, or to the one that was started in its place."""
        self.info, self.control = started.info, started.control
        self.api = HttpApi(started.url, self._key)

    async def loads(self, *, timeout_s: float) -> tuple[Load, ...]:
        """Gauges of each of the server's schedulers. An answer shows that the processes that compute are alive."""
        return await self.dialect.loads(self.api.limited(timeout_s))

    async def begin_update(self) -> None:
        """Open a weight update."""
        if not self._is_attached:
            await self.dialect.begin_update(self.api, self.info)

    async def end_update(self) -> None:
        """Close the weight update."""
        if not self._is_attached:
            await self.dialect.end_update(self.api, self.info)

    async def update(self, command: UpdateCommand, version: int) -> list[dict[str, Any]]:
        """Have the server take what the trainer sends. Returns what `Receiver.run` says, for each process.

        Raises `SyncError`, `EngineError`.
        """
        if self._is_attached:
            return [await self._update_from_files(command, version)]
        api, flush = self.api.limited(command.timeout_s), command.flush_cache
        return await self._run(api, asdict(command), version=version, flush_cache=flush)

    async def checksums(self, timeout_s: float) -> Mapping[str, int]:
        """Checksums of every parameter of every process. Raises `SyncError`, `EngineError`."""
        if self._is_attached:
            raise EngineError(f"{self.api.url}: parameters of servers that others run cannot be read")
        await self.begin_update()
        receipts = await self._run(self.api.limited(timeout_s), None, version=None, flush_cache=False)
        await self.end_update()
        return {
            f"{name}@{rank}" if len(receipts) > 1 else name: value
            for rank, receipt in enumerate(receipts)
            for name, value in receipt["checksums"].items()
        }

    async def _run(
        self, api: HttpApi, update: Mapping[str, Any] | None, *, version: int | None, flush_cache: bool
    ) -> list[dict[str, Any]]:
        """Have every process `execute` a command, and return their receipts in rank order."""
        name = uuid.uuid4().hex
        command = {"name": name, "control": (self.control.host, self.control.port), "update": update}
        message = json.dumps(command).encode()
        await self.dialect.update(api, self.info, message, version=version, flush_cache=flush_cache)
        return await asyncio.to_thread(lambda: [self._receipt(name, rank) for rank in range(self.info.ranks)])

    def _receipt(self, name: str, rank: int) -> dict[str, Any]:
        receipt = self.control.get(f"{name}/{rank}")
        if receipt is None:
            raise SyncError(f"rank {rank} of the engine gave no receipt")
        if error := decode_error(receipt):
            raise error
        return receipt

    async def _update_from_files(self, command: UpdateCommand, version: int) -> dict[str, Any]:
        """Check the files in place of the server, which then loads all of them at once."""
        receiver = Receiver(
            address=self.control,
            command=command,
            load=lambda bucket: None,  # reading it was enough
            rank=0,
            device=torch.device("cpu"),
        )
        receipt = await asyncio.to_thread(receiver.run)
        api, folder = self.api.limited(command.timeout_s), Path(command.folder)
        await self.dialect.load_folder(api, folder, version=version, flush_cache=command.flush_cache)
        return receipt
