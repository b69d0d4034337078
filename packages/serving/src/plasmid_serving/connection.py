"""The engine's connection to one running server: its HTTP API, via the dialect, and its control channel."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plasmid.errors import EngineError, SyncError

from .api import HttpApi, ServerAddress
from .dialect import Dialect, Load, ServerInfo
from .weights.command import UpdateCommand
from .weights.control import ControlAddress
from .weights.errors import decode_error


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedServer:
    """A server that is ready."""

    address: ServerAddress
    info: ServerInfo
    control: ControlAddress
    """Control channel of weight syncs."""


class ServerConnection:
    """The engine's calls to one server."""

    def __init__(self, dialect: Dialect, started: StartedServer, secret: str, *, is_attached: bool) -> None:
        """With ``is_attached`` the server is external: it loads weights from files, and they cannot be read back.

        ``secret`` is that of `ServerAddress.open`.
        """
        self.dialect, self.secret, self._is_attached = dialect, secret, is_attached
        self.open(started)

    def open(self, started: StartedServer) -> None:
        """Connect to the server, or to its replacement."""
        self.address, self.info, self.control = started.address, started.info, started.control
        self.api = started.address.open(self.secret)

    async def loads(self, *, timeout_s: float) -> tuple[Load, ...]:
        """Return the load of each scheduler. A response proves that the compute processes are alive."""
        return await self.dialect.loads(self.api.with_time_limit(timeout_s))

    async def begin_update(self) -> None:
        """Begin a weight update."""
        if not self._is_attached:
            await self.dialect.begin_update(self.api, self.info)

    async def end_update(self) -> None:
        """End the weight update."""
        if not self._is_attached:
            await self.dialect.end_update(self.api, self.info)

    async def update(self, command: UpdateCommand, version: int) -> list[dict[str, Any]]:
        """Have the server load what the trainer sends. Returns the results of `Receiver.run`, one per process.

        Raises `SyncError`, `EngineError`.
        """
        if self._is_attached:
            return [await self._update_from_files(command, version)]
        api, flush = self.api.with_time_limit(command.timeout_s), command.flush_cache
        return await self._run(api, asdict(command), version=version, flush_cache=flush)

    async def checksums(self, timeout_s: float) -> Mapping[str, int]:
        """Return checksums of all parameters of all processes. Raises `SyncError`, `EngineError`."""
        if self._is_attached:
            raise EngineError(f"{self.api.url}: cannot read the parameters of a server that the run did not start")
        await self.begin_update()
        results = await self._run(self.api.with_time_limit(timeout_s), None, version=None, flush_cache=False)
        await self.end_update()
        return {
            f"{name}@{rank}" if len(results) > 1 else name: value
            for rank, result in enumerate(results)
            for name, value in result["checksums"].items()
        }

    async def _run(
        self, api: HttpApi, update: Mapping[str, Any] | None, *, version: int | None, flush_cache: bool
    ) -> list[dict[str, Any]]:
        """Have every process `execute` a command. Returns their results in rank order."""
        name = uuid.uuid4().hex
        command = {"name": name, "control": (self.control.host, self.control.port), "update": update}
        message = json.dumps(command).encode()
        await self.dialect.update(api, self.info, message, version=version, flush_cache=flush_cache)
        return await asyncio.to_thread(lambda: [self._read_result(name, rank) for rank in range(self.info.ranks)])

    def _read_result(self, name: str, rank: int) -> dict[str, Any]:
        result = self.control.get(f"{name}/{rank}")
        if result is None:
            raise SyncError(f"engine rank {rank} returned no result")
        if error := decode_error(result):
            raise error
        return result

    async def _update_from_files(self, command: UpdateCommand, version: int) -> dict[str, Any]:
        """Check the checksums of all files, then have the external server load them at once."""
        import torch  # not at module level, because its import would delay the start of servers

        from .weights.receiver import Receiver

        receiver = Receiver(
            address=self.control,
            command=command,
            load=lambda bucket: None,  # the receiver verifies a bucket before it calls `load`
            rank=0,
            device=torch.device("cpu"),
        )
        result = await asyncio.to_thread(receiver.run)
        api, folder = self.api.with_time_limit(command.timeout_s), Path(command.folder)
        await self.dialect.load_folder(api, folder, version=version, flush_cache=command.flush_cache)
        return result
