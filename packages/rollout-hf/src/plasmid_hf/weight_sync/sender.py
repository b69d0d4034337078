"""How weights get from a trainer rank into the engine processes: buckets as bytes, through the actors' handles."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from plasmid.protocols import Actor, Bucket, Sender

IN_FLIGHT = 2
"""Buckets on the way at once: one is copied while the next is on the wire."""


@dataclass(slots=True, kw_only=True)
class HFWire:
    """Implements `Wire`. The token names one weight sync, so that late calls of an earlier one are recognized."""

    actors: tuple[Actor, ...]
    token: str
    timeout_s: float
    senders: Literal["first", "all"] = "first"

    def open(self, *, rank: int, version: int) -> Sender:
        """Start sending from this rank."""
        return HFSender(self, version)


class HFSender:
    """Implements `Sender`. Calls run on a loop in a thread of its own, because a rank's code is synchronous."""

    def __init__(self, wire: HFWire, version: int) -> None:
        self._wire = wire
        self._version = version
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-sender", daemon=True)
        self._thread.start()
        self._sent: deque[Future[None]] = deque()

    def send(self, bucket: Bucket) -> None:
        """Hand over one bucket to every engine. Raises what an earlier one met."""
        while len(self._sent) >= IN_FLIGHT:
            self._sent.popleft().result()
        header = {
            "index": bucket.index,
            "names": bucket.names,
            "shapes": bucket.shapes,
            "dtypes": bucket.dtypes,
            "checksum": bucket.checksum,
        }
        data = bucket.data.cpu().numpy()
        self._sent.append(self._start(self._call_all("put_bucket", header, data)))

    def close(self, *, ok: bool) -> None:
        """Wait for everything sent, then say whether it is complete. Raises what any engine met."""
        try:
            error = self._first_error()
            finish = self._start(self._call_all("finish_update", ok and error is None))
            finish.result()
            if error is not None and ok:
                raise error
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _first_error(self) -> BaseException | None:
        errors = [future.exception() for future in self._sent]
        self._sent.clear()
        return next((error for error in errors if error is not None), None)

    async def _call_all(self, method: str, *args: Any) -> None:
        wire = self._wire
        calls = [
            actor.call(method, wire.token, self._version, *args, timeout_s=wire.timeout_s) for actor in wire.actors
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        error = next((result for result in results if isinstance(result, BaseException)), None)
        if error is not None:
            raise error

    def _start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
