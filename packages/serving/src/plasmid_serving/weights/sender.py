"""Sending side of a weight sync, on a trainer rank.

The driver creates `ServersWire`, so this module must not import torch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from plasmid.errors import DeadlineError, PlasmidError
from plasmid.protocols import Bucket, Sender

from .bucket_server import BucketServer
from .command import HEADER, Transport, UpdateCommand
from .control import CONNECTIONS, OVER, ControlAddress, ControlChannel
from .errors import connection_lost_error, decode_error, sync_failure

if TYPE_CHECKING:
    from .broadcast import BroadcastHost

IN_FLIGHT: Mapping[Transport, int] = {"ipc": 1, "broadcast": 1, "disk": 2, "http": 2}
"""Maximum number of buckets in flight besides the one being built. Each takes memory."""
HOSTS: dict[str, BroadcastHost] = {}
"""Broadcast groups that this rank hosts. Joining is slow, so they are kept for later syncs with the same servers."""


def broadcast_host(command: UpdateCommand) -> BroadcastHost:
    """Return the command's group, with this rank as rank 0."""
    from .broadcast import BroadcastHost

    if command.group not in HOSTS:
        HOSTS.clear()
        timeout = timedelta(seconds=command.timeout_s)
        HOSTS[command.group] = BroadcastHost(command.backend, size=command.size, timeout=timeout)
    return HOSTS[command.group]


@dataclass(slots=True, kw_only=True)
class ServersWire:
    """Implements `Wire` for one weight sync."""

    command: UpdateCommand
    addresses: Mapping[int, ControlAddress]
    """Control channel of each server that gets the weights, by server index."""
    first_ranks: Mapping[int, int] = field(default_factory=dict)
    """With transport "broadcast": rank in the group of each server's first process."""
    senders: Literal["first", "all", "divided"] = "first"

    def command_to(self, index: int) -> UpdateCommand:
        """Return the command for one server."""
        return replace(self.command, first_rank=self.first_ranks.get(index, 0))

    def open(self, *, rank: int, version: int) -> Sender:
        """Start sending from this rank."""
        ranks = self.command.ranks
        if self.command.transport == "ipc":  # trainer ranks share GPUs with the servers' processes, in the same order
            index, process = divmod(rank, ranks)
            return ServersSender(self, {index: (process,)} if index in self.addresses else {})
        sender = rank if self.senders == "divided" else 0
        return ServersSender(self, {index: range(ranks) for index in self.addresses}, sender)


class ServersSender:
    """Implements `Sender`: announces each bucket to every process, and waits until it has been loaded.

    A server that fails gets no more buckets. Sending fails only when all servers have failed.
    """

    def __init__(self, wire: ServersWire, processes: Mapping[int, Sequence[int]], sender: int = 0) -> None:
        """``processes`` lists, for each server, those that this rank sends to; may be empty.

        ``sender`` is the number of this rank among those that send to the same processes.
        """
        self._wire, self._command, self._sender = wire, wire.command, sender
        self._errors: dict[int, PlasmidError] = {}
        self._channels: dict[int, list[ControlChannel]] = {}
        for index, ranks in processes.items():
            self._channels[index] = [
                ControlChannel.of_sender(wire.addresses[index], wire.command.token, rank, sender) for rank in ranks
            ]
        self._sent: deque[Bucket] = deque()
        self._server = BucketServer(wire.command.token) if wire.command.transport == "http" else None

    def send(self, bucket: Bucket) -> None:
        """Send one bucket to every server. Raises if no server is left."""
        if not self._channels:
            return
        while len(self._sent) >= IN_FLIGHT[self._command.transport]:
            self._await_first()
        self._check_any_left()
        header = {name: getattr(bucket, name) for name in HEADER} | {"num_bytes": bucket.data.numel()}
        message = {"bucket": header, "source": self._source(bucket), "sender": self._sender}
        self._sent.append(bucket)  # keeps the memory until the bucket is loaded
        for index in self._channels:
            # members of a broadcast must take part even after they have failed
            if self._command.group or index not in self._errors:
                self._put(index, message)
        if self._command.group:
            self._broadcast(bucket)

    def _broadcast(self, bucket: Bucket) -> None:
        """Broadcast a bucket. If a member is gone, leave the group and raise `EngineLostError`.

        A member that hangs is only detected by the time limit of the sync.
        """
        try:
            broadcast_host(self._command).group.broadcast(bucket.data)
        except RuntimeError:
            HOSTS.clear()
            self._await_first()
            if not self._errors:
                raise
            raise sync_failure(self._errors.values()) from None

    def _source(self, bucket: Bucket) -> dict[str, Any]:
        """Describe where processes find the bytes of a bucket."""
        transport = self._command.transport
        if self._server is not None:
            self._server.put(bucket)
            host, port = self._server.address
            return {"kind": transport, "host": host, "port": port}
        if transport == "ipc":
            from .sources import ipc_source

            return ipc_source(bucket.data)
        if transport == "broadcast":
            return {"kind": transport, "rendezvous": broadcast_host(self._command).url, "sender": self._sender}
        from plasmid_models.sync import unpack
        from safetensors.torch import save_file

        path = self._command.bucket_file(bucket.index)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu() for name, tensor in unpack(bucket)}, path, metadata={"format": "pt"})
        return {"kind": transport}

    def _await_first(self) -> None:
        """Wait until every server that has not failed has loaded the oldest bucket in flight."""
        bucket = self._sent.popleft()
        for index, channels in self._channels.items():
            if index not in self._errors:
                with self._record_errors(index):
                    for channel in channels:
                        if error := decode_error(channel.get(self._command.timeout_s)):
                            raise error
            if index in self._errors and not self._command.group:
                self._put(index, OVER)
        if self._server is not None:
            self._server.remove(bucket)

    @contextlib.contextmanager
    def _record_errors(self, index: int) -> Iterator[None]:
        """Store an error raised in the context as the error of one server, instead of raising it."""
        error: PlasmidError
        try:
            yield
            return
        except TimeoutError:
            error = DeadlineError(f"no answer within {self._command.timeout_s:g} s")
        except PlasmidError as answered:
            error = answered
        except RuntimeError as broken:
            CONNECTIONS.pop(self._wire.addresses[index], None)
            error = connection_lost_error(broken)
        self._errors.setdefault(index, error)

    def _put(self, index: int, message: Mapping[str, Any]) -> None:
        with self._record_errors(index):
            for channel in self._channels[index]:
                channel.put(message)

    def close(self, *, ok: bool) -> None:
        """Wait until every bucket is loaded, or announce that no more will come. Raises if no server is left."""
        try:
            if not ok:
                for index in self._channels:
                    self._put(index, OVER)
                return
            while self._sent:
                self._await_first()
            self._check_any_left()
        finally:
            if self._server is not None:
                self._server.close()

    def _check_any_left(self) -> None:
        if len(self._errors) == len(self._channels) > 0:
            raise sync_failure(self._errors.values())
