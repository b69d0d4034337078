"""One weight sync as the actor beside a server sees it: commands to SGLang's processes, and their receipts."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import EngineError, SyncError
from plasmid.types import BucketSum, SyncReceipt
from torch import Tensor

from .api import Abilities, Api
from .loader import COMMAND, DATA, NAME
from .lost import CutOffError


class Commands:
    """Runs the commands of `loader.py` in a server's processes."""

    def __init__(self, api: Api, abilities: Abilities, receipts: Path) -> None:
        self._api, self.abilities, self._receipts = api, abilities, receipts
        self._count = 0

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

    async def run(
        self,
        operation: str,
        *,
        timeout_s: float,
        data: Tensor | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
        **command: Any,
    ) -> list[dict[str, Any]]:
        """Receipts of every process, in rank order. Raises `SyncError`, `EngineError`."""
        self._receipts.mkdir(parents=True, exist_ok=True)
        self._count += 1
        name, ranks = f"{operation}-{self._count}", self.abilities.ranks
        told = {"operation": operation, "receipts": str(self._receipts), "name": name, "ranks": ranks, **command}
        tensors = [(COMMAND, _bytes_tensor(json.dumps(told).encode()))]
        if data is not None:
            tensors.append((DATA, data))
        payload = base64.b64encode(pickle.dumps(tensors)).decode()
        body: dict[str, Any] = {
            "serialized_named_tensors": [payload] * ranks,
            "load_format": NAME,
            "flush_cache": flush_cache,
        }
        body |= {"selector": "target"} if self.abilities.has_selector else {"disable_draft_model": True}
        if weight_version is not None:
            body["weight_version"] = weight_version
        await self._api.post("/update_weights_from_tensor", body, timeout_s=timeout_s)
        return [self._read(name, rank) for rank in range(ranks)]

    def _read(self, name: str, rank: int) -> dict[str, Any]:
        file = self._receipts / f"{name}.{rank}.json"
        try:
            receipt: dict[str, Any] = json.loads(file.read_text())
        except FileNotFoundError:
            raise SyncError(
                f"rank {rank} of the engine gave no receipt (is {self._receipts} on a shared disk?)"
            ) from None
        file.unlink()
        if "error" in receipt:
            raise (CutOffError if receipt["is_cut_off"] else SyncError)(receipt["error"])
        return receipt


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one update is to be."""

    token: str
    """Names it, so that stragglers of an earlier one are told apart."""
    senders: int = 1
    """Trainer ranks that hand over a part of every bucket each."""
    verify: bool = False
    """Read the parameters back."""
    flush_cache: bool = True
    """Forget prefixes that the older policy has computed."""
    timeout_s: float


class Update:
    """The update of one server: buckets in, one result out."""

    def __init__(self, commands: Commands, order: Order) -> None:
        self.order = order
        self.version: int | None = None
        """What it is of; the receiving call says so, which may come after the first bucket."""
        self._named = asyncio.Event()
        self._commands = commands
        self._sums: list[BucketSum] = []
        self._num_tensors = 0
        self._seconds: dict[str, float] = {}
        """Of the slowest process in each phase of each bucket; ``command`` is what SGLang adds to them."""
        self._turn = asyncio.Lock()
        self._parts: dict[int, dict[int, str]] = {}
        self._loaded: dict[int, asyncio.Future[None]] = {}
        self.result: asyncio.Future[SyncReceipt] = asyncio.get_running_loop().create_future()
        self.result.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting

    def name(self, version: int) -> None:
        """Say what version this is."""
        self.version = version
        self._named.set()

    async def put(self, header: Mapping[str, Any], source: Mapping[str, Any], data: Tensor | None, rank: int) -> None:
        """Take one bucket, or one rank's handle of it; returns when all processes have it. Raises `SyncError`."""
        index = header["index"]
        loaded = self._loaded.setdefault(index, asyncio.get_running_loop().create_future())
        parts = self._parts.setdefault(index, {})
        if "handle" in source:
            parts[rank] = source["handle"]
            if len(parts) < self.order.senders:
                await asyncio.shield(loaded)
                return
            source = {"kind": source["kind"], "handles": [parts[r] for r in range(self.order.senders)]}
        try:
            await self._load(header, source, data)
        except Exception as error:
            self.fail(error)
            if not loaded.done():
                loaded.set_exception(error)
                loaded.exception()
            raise
        loaded.set_result(None)

    async def _load(self, header: Mapping[str, Any], source: Mapping[str, Any], data: Tensor | None) -> None:
        async with self._turn:
            self._check_open()
            began = time.perf_counter()
            receipts = await self._commands.run(
                "load",
                timeout_s=self.order.timeout_s,
                data=data,
                bucket=dict(header),
                source=dict(source),
                verify=self.order.verify,
                token=self.order.token,
                **(await self._ending() if header["is_last"] else {}),
            )
            self._count(receipts, time.perf_counter() - began)
        found = {(receipt["num_bytes"], receipt["checksum"]) for receipt in receipts}
        if len(found) > 1:
            raise SyncError(f"ranks of the engine received different bytes as bucket {header['index']}")
        ((num_bytes, checksum),) = found
        self._sums.append(BucketSum(index=header["index"], num_bytes=num_bytes, checksum=checksum))
        self._num_tensors += len(header["names"])
        if header["is_last"]:
            await self._complete()

    async def _ending(self) -> dict[str, Any]:
        """What is said with the last command: it makes the version that the receiving call has named."""
        await self._named.wait()
        return {"weight_version": str(self.version), "flush_cache": self.order.flush_cache}

    async def _complete(self) -> None:
        assert self.version is not None
        began = time.perf_counter()
        await self._commands.end()
        sums = tuple(sorted(self._sums, key=lambda s: s.index))
        phases = self._seconds | {"finish": time.perf_counter() - began}
        self.result.set_result(
            SyncReceipt(version=self.version, num_tensors=self._num_tensors, buckets=sums, phases=phases)
        )

    def _count(self, receipts: Sequence[Mapping[str, Any]], seconds: float) -> None:
        phases = receipts[0].get("seconds", ())  # servers of others say nothing of theirs
        slowest = {phase: max(r["seconds"][phase] for r in receipts) for phase in phases}
        for phase, value in (slowest | {"command": seconds - sum(slowest.values())}).items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + value

    def _check_open(self) -> None:
        if self.result.done():
            raise self.result.exception() or SyncError(f"weight sync of version {self.version}: is over already")

    def give_up(self) -> None:
        """A sender has failed, so that its last bucket will not come."""
        self.fail(CutOffError("the sender gave up"))

    def fail(self, error: Exception) -> None:
        """End it. What was written stays written, so the engine must not serve."""
        if not self.result.done():
            kind = type(error) if isinstance(error, SyncError | EngineError) else SyncError
            self.result.set_exception(kind(f"weight sync of version {self.version}: {error}"))
