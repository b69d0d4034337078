"""Receiving side of a weight sync in one server process: buckets in the order of their index."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from plasmid.errors import SyncError, one_line
from plasmid.protocols import Bucket
from plasmid_models.sync import checksum

from .command import HEADER, UpdateCommand
from .control import OVER, ControlAddress, ControlChannel
from .errors import SyncAbortedError, encode_error
from .sources import fetch, leave_groups


@dataclass(slots=True, kw_only=True)
class Receiver:
    """Fetches, verifies and loads every bucket, then confirms it, so that the sender may reuse its memory."""

    address: ControlAddress
    command: UpdateCommand
    load: Callable[[Bucket], None]
    rank: int
    device: torch.device
    _channel: ControlChannel = field(init=False)
    _early: dict[int, dict[str, Any]] = field(default_factory=dict, init=False)
    """Announced buckets whose turn has not come, by index. Senders are independent, but all processes need one order:
    otherwise two of them could wait in the broadcasts of different senders."""
    _sums: list[tuple[int, int, int]] = field(default_factory=list, init=False)
    _num_tensors: int = field(default=0, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _error: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._channel = ControlChannel.of_process(self.address, self.command.token, self.rank)

    def run(self) -> dict[str, Any]:
        """Receive all buckets and return their part of the result. Errors are sent to the sender, then raised."""
        is_last, index = False, 0
        while not is_last:
            message = self._next(index)
            if message == OVER:
                leave_groups()  # another sender may be waiting in its broadcast
                raise self._error or SyncAbortedError("aborted by the sender")
            is_last = message["bucket"]["is_last"]
            try:
                self._receive(message["bucket"], message["source"])
            except Exception as error:  # noqa: BLE001  other members of a broadcast wait: continue without loading
                self._error = self._error or error
            channel = ControlChannel.of_process(self.address, self.command.token, self.rank, message["sender"])
            channel.put(encode_error(self._error) if self._error else {"index": index})
            index += 1
            if isinstance(self._error, SyncAbortedError):
                break
        if self._error is not None:
            raise self._error
        return {"buckets": self._sums, "num_tensors": self._num_tensors, "seconds": self._seconds}

    def _next(self, index: int) -> dict[str, Any]:
        """Return the announcement of the bucket ``index``, or `OVER`."""
        began = time.perf_counter()
        try:
            while index not in self._early:
                message = self._channel.get(self.command.timeout_s)
                if message == OVER:
                    return message
                self._early[message["bucket"]["index"]] = message
            return self._early.pop(index)
        except TimeoutError:
            raise SyncAbortedError(f"no message from the sender for {self.command.timeout_s:g} s") from None
        except RuntimeError as error:
            raise SyncAbortedError(f"lost connection to the sender: {one_line(error)}") from None
        finally:
            self._time("wait", began)

    def _receive(self, header: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        data = fetch(source, header, self.command, rank=self.rank, device=self.device)
        began = self._time("fetch", began)
        if self._error is not None:
            return
        found = checksum(data)
        began = self._time("check", began)
        if found != header["checksum"]:
            raise SyncError(f"bucket {header['index']} has checksum {found:016x}, expected {header['checksum']:016x}")
        self.load(Bucket(data=data, **{name: header[name] for name in HEADER}))
        if data.is_cuda:
            torch.cuda.synchronize()  # the sender may reuse the memory after the answer
        self._time("load", began)
        self._sums.append((header["index"], data.numel(), found))
        self._num_tensors += len(header["names"])

    def _time(self, phase: str, began: float) -> float:
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - began
        return now
