"""One weight sync as the engine sees it: one command to the processes of each server, and their receipts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pickle
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from plasmid.errors import EngineError, PlasmidError, SyncError
from plasmid.types import BucketSum, SyncReceipt

from .api import Abilities, Api
from .control import ControlClient
from .loader import COMMAND, NAME
from .lost import CutOffError, gone, heard, told
from .stream import OVER
from .transport import Transport
from .wire import Order


class Commands:
    """Runs the commands of `loader.py` in a server's processes."""

    def __init__(self, api: Api, abilities: Abilities, control: ControlClient) -> None:
        self._api, self.abilities, self.control = api, abilities, control

    async def begin(self) -> None:
        """Open an update, where the release wants that. An earlier one that was given up is closed first."""
        if self.abilities.has_sessions:
            await self._session("/begin_weight_update", again=True)

    async def end(self) -> None:
        """Close the update."""
        if self.abilities.has_sessions:
            await self._session("/end_weight_update", again=False)

    async def _session(self, path: str, *, again: bool) -> None:
        try:
            await self._api.post(path)
        except EngineError:
            if not again:
                raise
            await self._api.post("/end_weight_update")
            await self._api.post(path)

    async def take_over(self, order: Order, transport: Transport, version: int) -> list[dict[str, Any]]:
        """Have the processes take what the trainer sends; see `run` for what comes of it."""
        return await self.run(
            "take_over",
            timeout_s=order.timeout_s,
            settings={"weight_version": str(version), "flush_cache": order.flush_cache},
            token=order.token,
            verify=order.verify,
            transport=asdict(transport),
        )

    async def run(
        self, operation: str, *, timeout_s: float, settings: Mapping[str, Any], **command: Any
    ) -> list[dict[str, Any]]:
        """Receipts of every process, in rank order; ``settings`` are SGLang's. Raises `SyncError`, `EngineError`."""
        name, ranks = uuid.uuid4().hex, self.abilities.ranks
        control = (self.control.address.host, self.control.address.port)  # the processes have the key
        what = {"operation": operation, "control": control, "name": name, "ranks": ranks, "timeout_s": timeout_s}
        tensors = [(COMMAND, torch.frombuffer(bytearray(json.dumps(what | command).encode()), dtype=torch.uint8))]
        payload = base64.b64encode(pickle.dumps(tensors)).decode()
        body: dict[str, Any] = {
            "serialized_named_tensors": [payload] * ranks,
            "load_format": NAME,
            **settings,
        }
        body |= {"selector": "target"} if self.abilities.has_selector else {"disable_draft_model": True}
        await self._api.post("/update_weights_from_tensor", body, timeout_s=timeout_s)
        return await asyncio.to_thread(lambda: [self._read(name, rank) for rank in range(ranks)])

    async def checksums(self, timeout_s: float) -> Mapping[str, int]:
        """Of every parameter of every process. Raises `SyncError`, `EngineError`."""
        await self.begin()
        receipts = await self.run("checksums", timeout_s=timeout_s, settings={"flush_cache": False})
        await self.end()
        several = len(receipts) > 1
        return {
            f"{name}@{rank}" if several else name: value
            for rank, receipt in enumerate(receipts)
            for name, value in receipt["checksums"].items()
        }

    def _read(self, name: str, rank: int) -> dict[str, Any]:
        receipt = self.control.read(f"{name}/{rank}")
        if receipt is None:
            raise SyncError(f"rank {rank} of the engine gave no receipt")
        if error := heard(receipt):
            raise error
        return receipt


class Update:
    """The update of one server, from the command to the receipt."""

    def __init__(self, commands: Commands, order: Order, transport: Transport, version: int) -> None:
        self._commands, self._order, self._transport, self._version = commands, order, transport, version
        self._task = asyncio.ensure_future(self._run())
        self._why: PlasmidError | None = None

    def end(self, why: PlasmidError) -> None:
        """Break it off, if it is not complete. What was written stays written, so the engine must not serve."""
        if not self._task.done():
            self._why = why
            self._task.cancel()

    async def pulse(self) -> int | None:
        """A number that grows while the server's processes are at it; None when it is over, or nobody knows."""
        if self._task.done():
            return None
        try:
            return await asyncio.to_thread(self._commands.control.pulse, self._order.token)
        except RuntimeError:
            return None

    async def result(self) -> SyncReceipt:
        """When all weights are in the model, under their version. Raises `SyncError`, `EngineError`."""
        try:
            async with asyncio.timeout(self._order.timeout_s):
                return await self._task
        except TimeoutError:
            error: PlasmidError = SyncError(f"not complete within {self._order.timeout_s:g} s")
        except asyncio.CancelledError:
            if self._why is None:
                self._tell(CutOffError("the engine gave up"))
                raise
            error = self._why
        except PlasmidError as failed:
            error = failed
        except RuntimeError as broken:
            error = gone(broken)
        kind = type(error) if isinstance(error, SyncError | EngineError) else SyncError
        error = kind(f"weight sync of version {self._version}: {error}")
        await asyncio.to_thread(self._tell, error)
        raise error

    def _tell(self, error: Exception) -> None:
        """Let nobody wait for anybody."""
        with contextlib.suppress(RuntimeError):
            order, control = self._order, self._commands.control
            control.put_all(order.token, order.ranks, orders=OVER, answers=told(error))

    async def _run(self) -> SyncReceipt:
        order, commands = self._order, self._commands
        await asyncio.to_thread(commands.control.open, order.token)
        await commands.begin()
        began = time.perf_counter()
        receipts = await commands.take_over(order, self._transport, self._version)
        phases = _phases(receipts, time.perf_counter() - began)
        began = time.perf_counter()
        await commands.end()
        found = receipts[0]
        if any((r["buckets"], r["num_tensors"]) != (found["buckets"], found["num_tensors"]) for r in receipts):
            raise SyncError("ranks of the engine received different bytes")
        return SyncReceipt(
            version=self._version,
            num_tensors=found["num_tensors"],
            buckets=tuple(BucketSum(index=i, num_bytes=n, checksum=c) for i, n, c in found["buckets"]),
            phases=phases | {"finish": time.perf_counter() - began},
        )


def _phases(receipts: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """Of the slowest process in each; ``command`` is what SGLang adds to them."""
    slowest = {phase: max(r["seconds"][phase] for r in receipts) for phase in receipts[0]["seconds"]}
    return slowest | {"command": seconds - max(sum(r["seconds"].values()) for r in receipts)}
