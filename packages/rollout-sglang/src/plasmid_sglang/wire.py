"""The sending half of a weight sync, on the trainer's ranks: buckets to the actors beside the servers."""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
from collections import deque
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from plasmid.errors import SyncError
from plasmid.protocols import Actor, Bucket, Sender
from plasmid.sync import unpack

from .group import Host
from .lost import lost

Kind = Literal["ipc", "broadcast", "disk", "http"]
IN_FLIGHT: Mapping[Kind, int] = {"ipc": 1, "broadcast": 1, "disk": 2, "http": 2}
"""Buckets on the way besides the one that is being made; each is one more in memory."""
HOSTED: dict[str, Host] = {}
"""The group that this rank broadcasts in: joining takes long, so it serves every later sync with the same engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the members of a broadcast meet: the sending rank first, then the processes of each engine in turn."""

    name: str
    backend: str
    first_ranks: tuple[int, ...]
    """Of each actor's server, in the order of the actors."""
    size: int

    def host(self, timeout_s: float) -> Host:
        """As rank 0, on this machine; kept for later syncs."""
        if self.name not in HOSTED:
            HOSTED.clear()
            HOSTED[self.name] = Host(self.backend, size=self.size, timeout=timedelta(seconds=timeout_s))
        return HOSTED[self.name]


@dataclass(slots=True, kw_only=True)
class SGLangWire:
    """Implements `Wire`. The token names one weight sync."""

    kind: Kind
    actors: tuple[Actor, ...]
    token: str
    timeout_s: float
    senders: Literal["first", "all"] = "first"
    folder: Path | None = None
    """With kind "disk": where the files of this version go."""
    meeting: Meeting | None = None
    """With kind "broadcast"."""
    ranks_per_engine: int = 1
    """With kind "ipc": trainer ranks on the GPUs of each engine, in one order with its processes."""

    def open(self, *, rank: int, version: int) -> Sender:
        """Start sending from this rank."""
        if self.kind != "ipc":
            return SGLangSender(self, self.actors, rank=0)
        engine, place = divmod(rank, self.ranks_per_engine)
        return SGLangSender(self, self.actors[engine : engine + 1], rank=place)


class SGLangSender:
    """Implements `Sender`. Calls run on a loop in a thread of its own, because a rank's code is synchronous.

    An engine that fails is left out of the rest; only when all have failed does sending fail.
    """

    def __init__(self, wire: SGLangWire, actors: tuple[Actor, ...], *, rank: int) -> None:
        self._wire, self._rank = wire, rank
        self._actors = dict(enumerate(actors))
        self._errors: list[Exception] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-sender", daemon=True)
        self._thread.start()
        self._sent: deque[tuple[Future[None], Bucket]] = deque()

    def send(self, bucket: Bucket) -> None:
        """Hand over one bucket to every engine. Raises when none is left."""
        while len(self._sent) >= IN_FLIGHT[self._wire.kind]:
            self._sent.popleft()[0].result()
        self._check_any_left()
        header = {
            "index": bucket.index,
            "names": bucket.names,
            "shapes": bucket.shapes,
            "dtypes": bucket.dtypes,
            "checksum": bucket.checksum,
            "num_bytes": bucket.data.numel(),
            "is_last": bucket.is_last,
        }
        source, data = self._source(bucket)
        # the bucket is kept with its call: what lies in shared memory must live until it is taken over
        self._sent.append((self._start(self._put(header, source, data)), bucket))
        if self._wire.meeting is not None and self._actors:
            self._broadcast(self._wire.meeting, bucket)

    def _broadcast(self, meeting: Meeting, bucket: Bucket) -> None:
        """If a member has gone, leave: the others would wait for what it was to hand on. Raises `EngineLostError` then.

        A server that hangs is noticed by the wire's time limit only.
        """
        try:
            meeting.host(self._wire.timeout_s).group.broadcast(bucket.data)
        except RuntimeError:
            HOSTED.clear()
            self._sent.pop()[0].result()
            if not self._errors:
                raise
            raise lost(self._errors) from None

    def _source(self, bucket: Bucket) -> tuple[dict[str, Any], Any]:
        kind = self._wire.kind
        if kind == "http":
            return {"kind": kind}, bucket.data.cpu().numpy()
        if kind == "disk":
            return {"kind": kind, "path": str(self._write(bucket))}, None
        if kind == "ipc":
            return {"kind": kind, "handle": _handle(bucket.data)}, None
        meeting = self._wire.meeting
        assert meeting is not None
        host = meeting.host(self._wire.timeout_s)
        where = {"host": host.address, "port": host.port, "size": meeting.size, "backend": meeting.backend}
        return {"kind": kind, "group": meeting.name, "timeout_s": self._wire.timeout_s, **where}, None

    def _write(self, bucket: Bucket) -> Path:
        from safetensors.torch import save_file

        assert self._wire.folder is not None
        self._wire.folder.mkdir(parents=True, exist_ok=True)
        path = self._wire.folder / f"model-{bucket.index:05d}.safetensors"
        save_file({name: tensor.cpu() for name, tensor in unpack(bucket)}, path, metadata={"format": "pt"})
        return path

    def close(self, *, ok: bool) -> None:
        """Wait until everything sent is there, or say that no more will come. Raises when no engine is left."""
        try:
            for future, _ in self._sent:
                future.result()
            self._sent.clear()
            if ok:
                self._check_any_left()
            else:
                self._start(self._tell_all("give_up_update", lambda i: ())).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _check_any_left(self) -> None:
        if not self._actors:
            raise lost(self._errors)

    async def _put(self, header: Mapping[str, Any], source: Mapping[str, Any], data: Any) -> None:
        meeting = self._wire.meeting

        def told(index: int) -> Mapping[str, Any]:
            return source if meeting is None else {**source, "first_rank": meeting.first_ranks[index]}

        await self._tell_all("put_bucket", lambda i: (header, told(i), data, self._rank))

    async def _tell_all(self, method: str, arguments: Any) -> None:
        wire = self._wire
        indices = list(self._actors)
        calls = [self._actors[i].call(method, wire.token, *arguments(i), timeout_s=wire.timeout_s) for i in indices]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for index, result in zip(indices, results, strict=True):
            if isinstance(result, BaseException):
                self._actors.pop(index, None)
                self._errors.append(result if isinstance(result, Exception) else SyncError(str(result)))

    def _start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _handle(data: torch.Tensor) -> str:
    """What another process on the same GPU opens the memory with."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.current_stream().synchronize()
    handle = reduce_tensor(data)  # type: ignore[no-untyped-call]
    return base64.b64encode(pickle.dumps(handle)).decode()
