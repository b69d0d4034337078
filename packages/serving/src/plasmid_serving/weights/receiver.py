"""Receiving side of a weight sync in one server process: buckets in the order of their announcements."""

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
from .sources import fetch


@dataclass(slots=True, kw_only=True)
class Receiver:
    """Fetches, verifies and loads every bucket, then confirms it, so that the sender may reuse its memory."""

    address: ControlAddress
    command: UpdateCommand
    load: Callable[[Bucket], None]
    rank: int
    device: torch.device
    _channel: ControlChannel = field(init=False)
    _sums: list[tuple[int, int, int]] = field(default_factory=list, init=False)
    _num_tensors: int = field(default=0, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _error: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._channel = ControlChannel.of_process(self.address, self.command.token, self.rank)

    def run(self) -> dict[str, Any]:
        """Receive all buckets and return their part of the receipt. Errors are sent to the sender, then raised."""
        is_last = False
        while not is_last:
            message = self._next()
            if message == OVER:
                raise self._error or SyncAbortedError("aborted by the sender")
            is_last, index = message["bucket"]["is_last"], message["bucket"]["index"]
            try:
                self._receive(message["bucket"], message["source"])
            except Exception as error:  # noqa: BLE001  other members of a broadcast wait: continue without loading
                self._error = self._error or error
            self._channel.put(encode_error(self._error) if self._error else {"index": index})
            if isinstance(self._error, SyncAbortedError):
                break
        if self._error is not None:
            raise self._error
        return {"buckets": self._sums, "num_tensors": self._num_tensors, "seconds": self._seconds}

    def _next(self) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            return self._channel.get(self.command.timeout_s)
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
