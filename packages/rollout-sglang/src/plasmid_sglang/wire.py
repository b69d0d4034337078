"""The sending half of a weight sync, on the trainer's ranks: buckets to the processes of the servers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from plasmid.errors import DeadlineError, PlasmidError
from plasmid.protocols import Bucket, Sender
from plasmid.sync import unpack

from .control import CONNECTIONS, ControlAddress, ControlChannel
from .group import Host
from .lost import gone, heard, lost
from .shelf import Shelf
from .sources import ipc_source
from .stream import OVER
from .transport import Kind, Transport

IN_FLIGHT: Mapping[Kind, int] = {"ipc": 1, "broadcast": 1, "disk": 2, "http": 2}
"""Buckets on the way besides the one that is being made; each is one more in memory."""
HOSTED: dict[str, Host] = {}
"""The group that this rank broadcasts in: joining takes long, so it serves every later sync with the same engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the members of a broadcast meet: the sending rank first, then the processes of each engine in turn."""

    name: str
    backend: str
    first_ranks: Mapping[int, int]
    """Of each engine, by its number."""
    size: int

    def host(self, timeout_s: float) -> Host:
        """As rank 0, on this machine; kept for later syncs."""
        if self.name not in HOSTED:
            HOSTED.clear()
            HOSTED[self.name] = Host(self.backend, size=self.size, timeout=timedelta(seconds=timeout_s))
        return HOSTED[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one update is to be."""

    token: str
    """Names it, so that stragglers of an earlier one are told apart. Secret: who knows it may fetch buckets."""
    ranks: int
    """Processes of each server."""
    verify: bool = False
    """Read the parameters back."""
    flush_cache: bool = True
    """Forget prefixes that the older policy has computed."""
    folder: Path | None = None
    """With kind "disk": where the files of this version go."""
    timeout_s: float


@dataclass(slots=True, kw_only=True)
class SGLangWire:
    """Implements `Wire`, for one weight sync."""

    kind: Kind
    order: Order
    addresses: Mapping[int, ControlAddress]
    """Control channel of each engine, by its number; one that is left out gets nothing."""
    senders: Literal["first", "all"] = "first"
    meeting: Meeting | None = None
    """With kind "broadcast"."""

    def transport(self, engine: int) -> Transport:
        """For the command to one engine."""
        order, meeting = self.order, self.meeting
        plan = Transport(kind=self.kind, token=order.token, folder=str(order.folder or ""))
        if meeting is None:
            return plan
        first_rank = meeting.first_ranks[engine]
        return replace(plan, backend=meeting.backend, group=meeting.name, first_rank=first_rank, size=meeting.size)

    def open(self, *, rank: int, version: int) -> Sender:
        """Start sending from this rank."""
        ranks = self.order.ranks
        if self.kind == "ipc":  # trainer ranks lie on the GPUs of the engines, in one order with their processes
            engine, place = divmod(rank, ranks)
            return SGLangSender(self, {engine: (place,)} if engine in self.addresses else {})
        return SGLangSender(self, {engine: range(ranks) for engine in self.addresses})


class SGLangSender:
    """Implements `Sender`: announces each bucket to every process, and waits until it has been taken over.

    An engine that fails is left out of the rest; only when all have failed does sending fail.
    """

    def __init__(self, wire: SGLangWire, processes: Mapping[int, Sequence[int]]) -> None:
        """``processes`` are those of each engine that this rank sends to; there may be none."""
        self._wire = wire
        self._errors: dict[int, PlasmidError] = {}
        self._peers: dict[int, list[ControlChannel]] = {}
        for engine, ranks in processes.items():
            self._peers[engine] = []
            with self._noting(engine):
                self._peers[engine] = [
                    ControlChannel.of_sender(wire.addresses[engine], wire.order.token, rank) for rank in ranks
                ]
        self._sent: deque[Bucket] = deque()
        self._shelf = Shelf(wire.order.token) if wire.kind == "http" else None

    def send(self, bucket: Bucket) -> None:
        """Hand over one bucket to every engine. Raises when none is left."""
        if not self._peers:
            return
        while len(self._sent) >= IN_FLIGHT[self._wire.kind]:
            self._settle()
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
        source, meeting = self._source(bucket), self._wire.meeting
        self._sent.append(bucket)  # its memory must live until it is taken over
        for engine, peers in self._told():
            with self._noting(engine):
                for peer in peers:
                    peer.put({"bucket": header, "source": source})
        if meeting is not None:
            self._broadcast(meeting, bucket)

    def _told(self) -> Iterator[tuple[int, list[ControlChannel]]]:
        """Engines that hear of a bucket: those that take part in a broadcast must, even if they load nothing more."""
        for engine, peers in self._peers.items():
            if self._wire.meeting is not None or engine not in self._errors:
                yield engine, peers

    def _broadcast(self, meeting: Meeting, bucket: Bucket) -> None:
        """If a member has gone, leave: the others would wait for what it was to hand on. Raises `EngineLostError` then.

        A server that hangs is noticed by the wire's time limit only.
        """
        try:
            meeting.host(self._wire.order.timeout_s).group.broadcast(bucket.data)
        except RuntimeError:
            HOSTED.clear()
            self._settle()
            if not self._errors:
                raise
            raise lost(self._errors.values()) from None

    def _source(self, bucket: Bucket) -> dict[str, Any]:
        kind = self._wire.kind
        if self._shelf is not None:
            self._shelf.put(bucket)
            host, port = self._shelf.address
            return {"kind": kind, "host": host, "port": port}
        if kind == "disk":
            self._write(bucket)
            return {"kind": kind}
        if kind == "ipc":
            return ipc_source(bucket.data)
        meeting = self._wire.meeting
        assert meeting is not None
        return {"kind": kind, "rendezvous": meeting.host(self._wire.order.timeout_s).url}

    def _write(self, bucket: Bucket) -> None:
        from safetensors.torch import save_file

        folder = self._wire.order.folder
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        path = Transport(kind="disk", token="", folder=str(folder)).bucket_file(bucket.index)
        save_file({name: tensor.cpu() for name, tensor in unpack(bucket)}, path, metadata={"format": "pt"})

    def _settle(self) -> None:
        """Wait until the bucket that was sent first is with every engine that has not failed."""
        bucket = self._sent.popleft()
        for engine, peers in self._peers.items():
            for peer in peers:
                if engine in self._errors:
                    break
                with self._noting(engine):
                    if error := heard(peer.get(self._wire.order.timeout_s)):
                        raise error
            if engine in self._errors and self._wire.meeting is None:
                self._say_over(engine)
        if self._shelf is not None:
            self._shelf.take_off(bucket)

    @contextlib.contextmanager
    def _noting(self, engine: int) -> Iterator[None]:
        """Errors in talking to an engine are its own."""
        error: PlasmidError
        try:
            yield
            return
        except TimeoutError:
            error = DeadlineError(f"no answer within {self._wire.order.timeout_s:g} s")
        except PlasmidError as heard_of:
            error = heard_of
        except RuntimeError as broken:
            CONNECTIONS.pop(self._wire.addresses[engine], None)
            error = gone(broken)
        self._errors.setdefault(engine, error)

    def _say_over(self, engine: int) -> None:
        with self._noting(engine):
            for peer in self._peers[engine]:
                peer.put(OVER)

    def close(self, *, ok: bool) -> None:
        """Wait until everything sent is there, or say that no more will come. Raises when no engine is left."""
        try:
            if not ok:
                for engine in self._peers:
                    self._say_over(engine)
                return
            while self._sent:
                self._settle()
            self._check_any_left()
        finally:
            if self._shelf is not None:
                self._shelf.close()

    def _check_any_left(self) -> None:
        if len(self._errors) == len(self._peers) > 0:
            raise lost(self._errors.values())
