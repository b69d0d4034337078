"""Sends weights from a trainer rank to the engine processes, as byte buckets through actor handles."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any, Concatenate, Literal, ParamSpec

from plasmid.protocols import Actor, Bucket, Sender, call

from .process.worker import EngineWorker

IN_FLIGHT = 2
"""Maximum number of buckets in flight: one is copied while the next is transferred."""
P = ParamSpec("P")


@dataclass(slots=True, kw_only=True)
class HFWire:
    """Implements `Wire`. The token identifies one weight sync, so that late calls of an earlier one are recognized."""

    actors: tuple[Actor, ...]
    token: str
    timeout_s: float
    num_senders: int = 1
    """Number of trainer ranks, each of which sends a share of the buckets."""
    senders: Literal["first", "all", "divided"] = "first"

    def open(self, *, rank: int, version: int) -> Sender:
        """Start sending from this rank."""
        return HFSender(self, version)


class HFSender:
    """Implements `Sender`. Calls run on an event loop in a separate thread, because trainer code is synchronous."""

    def __init__(self, wire: HFWire, version: int) -> None:
        self._wire = wire
        self._version = version
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-sender", daemon=True)
        self._thread.start()
        self._sent: deque[Future[None]] = deque()

    def send(self, bucket: Bucket) -> None:
        """Send one bucket to every engine. Raises errors of earlier buckets."""
        while len(self._sent) >= IN_FLIGHT:
            self._sent.popleft().result()
        header = {field.name: getattr(bucket, field.name) for field in fields(bucket) if field.name != "data"}
        data = bucket.data.cpu().numpy()
        self._sent.append(self._start(self._call_all(EngineWorker.put_bucket, header, data)))

    def close(self, *, ok: bool) -> None:
        """Wait until everything is sent, then report success or failure. Raises errors of any engine."""
        try:
            error = self._first_error()
            finish = self._start(
                self._call_all(EngineWorker.finish_update, ok and error is None, self._wire.num_senders)
            )
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

    async def _call_all(
        self, method: Callable[Concatenate[Any, str, int, P], Awaitable[None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        token, version, limit_s = self._wire.token, self._version, self._wire.timeout_s
        calls = [call(actor, limit_s, method, token, version, *args, **kwargs) for actor in self._wire.actors]
        results = await asyncio.gather(*calls, return_exceptions=True)
        error = next((result for result in results if isinstance(result, BaseException)), None)
        if error is not None:
            raise error

    def _start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
