"""The receiving half of one weight sync, in one process: buckets in the order in which the sender announces them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from plasmid.errors import SyncError, one_line
from plasmid.protocols import Bucket
from plasmid.sync import checksum

from .control import ControlChannel
from .lost import CutOffError, told
from .sources import Place, fetch
from .transport import Transport

OVER = {"over": True}
"""Said in place of a bucket: no more will come."""


@dataclass(slots=True, kw_only=True)
class Stream:
    """Takes every bucket, checks it, loads it, and says so, so that the sender may use its memory again."""

    channel: ControlChannel
    transport: Transport
    load: Callable[[Bucket], None]
    rank: int
    device: torch.device
    timeout_s: float
    """For the next bucket to be announced."""
    _sums: list[tuple[int, int, int]] = field(default_factory=list, init=False)
    _num_tensors: int = field(default=0, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _error: Exception | None = field(default=None, init=False)

    def run(self) -> dict[str, Any]:
        """What came, for the receipt. Raises what went wrong, when the sender has been told."""
        is_last = False
        while not is_last:
            message = self._next()
            if message == OVER:
                raise self._error or CutOffError("the sender gave up")
            is_last = message["bucket"]["is_last"]
            try:
                self._take(message["bucket"], message["source"])
            except Exception as error:  # noqa: BLE001  others of a broadcast must not wait: go on, and load nothing
                self._error = self._error or error
            self.channel.put(told(self._error) if self._error else {"index": message["bucket"]["index"]})
            if isinstance(self._error, CutOffError):
                break
        if self._error is not None:
            raise self._error
        return {"buckets": self._sums, "num_tensors": self._num_tensors, "seconds": self._seconds}

    def _next(self) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            return self.channel.get(self.timeout_s)
        except TimeoutError:
            raise CutOffError(f"the sender said nothing for {self.timeout_s:g} s") from None
        except RuntimeError as error:
            raise CutOffError(f"the sender cannot be heard: {one_line(error)}") from None
        finally:
            self._count("wait", began)

    def _take(self, header: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        place = Place(
            header=header, transport=self.transport, rank=self.rank, device=self.device, timeout_s=self.timeout_s
        )
        data = fetch(source, place)
        began = self._count("fetch", began)
        if self._error is not None:
            return
        found = checksum(data)
        began = self._count("check", began)
        if found != header["checksum"]:
            raise SyncError(
                f"bucket {header['index']} was sent with checksum {header['checksum']:016x} "
                f"and received with {found:016x}"
            )
        self.load(
            Bucket(
                index=header["index"],
                names=tuple(header["names"]),
                shapes=tuple(map(tuple, header["shapes"])),
                dtypes=tuple(header["dtypes"]),
                data=data,
                checksum=found,
                is_last=header["is_last"],
            )
        )
        if data.is_cuda:
            torch.cuda.synchronize()  # the sender may use the memory again once we have answered
        self._count("load", began)
        self._sums.append((header["index"], data.numel(), found))
        self._num_tensors += len(header["names"])

    def _count(self, phase: str, began: float) -> float:
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - began
        return now
