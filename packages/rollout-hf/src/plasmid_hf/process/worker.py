"""The actor class of an engine process, called by clients, the driver and trainer ranks.

Does not import torch, because callers import it for its methods.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, cast

import numpy as np
from numpy.typing import NDArray
from plasmid.components import AdapterSpec
from plasmid.config.run import ModelConfig
from plasmid.errors import EngineError
from plasmid.protocols import PauseMode
from plasmid.types import Completion, GenerateRequest, StopReason, SyncResult

from ..settings import HF
from .thread import EngineThread

if TYPE_CHECKING:
    from ..generation.row import Row
    from .core import EngineCore


class CompletionQueues:
    """One queue per client. Used on the actor's event loop; only `put` may be called from other threads."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Completion]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, client: str) -> asyncio.Queue[Completion]:
        """Return the queue of a client; create it if needed."""
        self._loop = asyncio.get_running_loop()
        return self._queues.setdefault(client, asyncio.Queue())

    def put(self, client: str, completion: Completion) -> None:
        """Add a completion to the queue of a client. Thread-safe."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._queues[client].put_nowait, completion)

    async def collect(self, client: str, *, wait_s: float) -> list[Completion]:
        """Take all completions of a client; wait up to ``wait_s`` seconds for the first."""
        queue = self.open(client)
        try:
            async with asyncio.timeout(wait_s):
                found = [await queue.get()]
        except TimeoutError:
            return []
        return found + [queue.get_nowait() for _ in range(queue.qsize())]


class SessionRoutes:
    """Assigns each new session to the engine with the fewest sessions, until the session ends."""

    def __init__(self, num_engines: int) -> None:
        self._loads = [0] * num_engines
        self._engines: dict[str, int] = {}

    def find(self, session_ids: Sequence[str]) -> list[int]:
        """Return the engine of each session, assigning new ones."""
        return [self._find(session) for session in session_ids]

    def _find(self, session: str) -> int:
        if session not in self._engines:
            engine = min(range(len(self._loads)), key=self._loads.__getitem__)
            self._engines[session] = engine
            self._loads[engine] += 1
        return self._engines[session]

    def forget(self, session_ids: Iterable[str]) -> None:
        """Remove sessions that have ended."""
        for session in session_ids:
            engine = self._engines.pop(session, None)
            if engine is not None:
                self._loads[engine] -= 1


P = ParamSpec("P")
COLLECT_S = 20.0
"""Maximum duration of one `collect` call without a completion, in seconds; the client then calls again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Start options of an engine process."""

    settings: HF
    model: ModelConfig
    adapter: AdapterSpec | None
    """Adapter that the trainer trains instead of the full weights; None for full training."""
    deterministic: bool
    """`run.deterministic`."""
    on_gpu: bool
    threads: int
    num_engines: int


class EngineWorker:
    """One model in one process. Methods are called through actor handles and may run concurrently."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._completions = CompletionQueues()
        self._routes = SessionRoutes(options.num_engines)
        self._open: dict[str, str] = {}
        """Client of each unanswered request."""
        self._core: EngineCore | None = None
        self._last = (time.monotonic(), 0)
        from .core import make_core

        def make() -> EngineCore:
            self._core = make_core(self._options)
            return self._core

        self._thread = EngineThread(make, num_threads=options.threads, on_failure=self._fail_requests)

    def load(self) -> None:
        """Wait until the model is loaded. Raises `ModelError` or `ConfigError`."""
        self._thread.started.result()

    @property
    def core(self) -> EngineCore:
        """Return the engine core."""
        assert self._core is not None
        return self._core

    async def _run(self, work: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call a method between two steps."""
        return await asyncio.wrap_future(self._thread.submit(partial(work, *args, **kwargs)))

    async def submit(self, client: str, requests: Sequence[GenerateRequest], ended_sessions: Sequence[str]) -> None:
        """Queue requests of a client and end sessions. Raises `EngineError`."""
        if requests and self.core.broken:
            raise EngineError(f"the engine cannot serve: {self.core.broken}")
        self._completions.open(client)
        for request in requests:
            self._open[request.id] = client
        if requests:
            self._check(self._thread.submit(partial(self.core.submit, requests, self._deliver)))
        if ended_sessions:
            self._check(self._thread.submit(partial(self.core.scheduler.end_sessions, ended_sessions)))

    def _check(self, answer: Future[None]) -> None:
        """Raise if the thread has ended; otherwise do not wait for the answer."""
        if answer.done():
            answer.result()

    def _deliver(self, completion: Completion) -> None:
        self._completions.put(self._open.pop(completion.request_id), completion)

    def _fail_requests(self, failure: str) -> None:
        """Fail all open requests because the thread has ended."""
        for request_id in list(self._open):
            self._deliver(
                Completion(
                    request_id=request_id,
                    token_ids=np.zeros(0, np.int32),
                    logprobs=np.zeros(0, np.float32),
                    versions=(),
                    stop_reason=StopReason.ERROR,
                    error=f"the engine has stopped: {failure}",
                )
            )

    async def collect(self, client: str) -> list[Completion]:
        """Return completions of a client's requests as soon as there are any; an empty list after `COLLECT_S`."""
        return await self._completions.collect(client, wait_s=COLLECT_S)

    async def route(self, session_ids: Sequence[str]) -> list[int]:
        """Return the engine of each session. Called on the first engine only."""
        return self._routes.find(session_ids)

    async def forget(self, session_ids: Sequence[str]) -> None:
        """Remove the routes of ended sessions. Called on the first engine only."""
        self._routes.forget(session_ids)

    async def expect(self, session_ids: Sequence[str]) -> None:
        """See `RolloutEngine.expect`."""
        await self._run(self.core.scheduler.expect, session_ids)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """See `EngineClient.abort`."""
        await self._run(self.core.abort, request_ids)

    async def fetch_partial(self, request_ids: Sequence[str]) -> list[Completion]:
        """See `EngineClient.fetch_partial`. The engine's thread only copies lists, between two steps."""
        rows: list[Row] = await self._run(self.core.copy_rows, request_ids)
        return [row.completion(StopReason.ABORT) for row in rows]

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await self._run(self.core.pause, mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`. Raises `SyncError`."""
        await self._run(self.core.resume)

    async def receive(self, token: str, version: int, limit_s: float) -> SyncResult:
        """Wait for the end of a weight sync. Raises `SyncError`, also if it exceeds the time limit."""
        result = self._thread.submit(partial(self.core.receive, token, version))
        try:
            async with asyncio.timeout(limit_s):
                return cast(SyncResult, await asyncio.wrap_future(result))
        except TimeoutError:
            reason = f"weight sync of version {version}: not complete within {limit_s:g} s"
            await self._run(self.core.fail_update, token, reason)
            return cast(SyncResult, await self._run(self.core.receive, token, version))

    async def put_bucket(self, token: str, version: int, header: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        """Write some weights into the model; returns when they are written. Raises `SyncError`."""
        await self._run(self.core.put_bucket, token, version, header, data)

    async def finish_update(self, token: str, version: int, ok: bool, num_senders: int) -> None:
        """Complete the weight sync with the last of its senders, or abort it if ``ok`` is false. Raises `SyncError`."""
        await self._run(self.core.finish_update, token, version, ok=ok, num_senders=num_senders)

    async def checksums(self) -> Mapping[str, int]:
        """See `RolloutEngine.checksum`."""
        return cast(Mapping[str, int], await self._run(self.core.checksums))

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        await self._run(self.core.sleep)

    async def wake(self, kv_cache: bool) -> None:
        """See `RolloutEngine.wake`."""
        await self._run(self.core.wake, kv_cache=kv_cache)

    async def health(self) -> None:
        """Raise `EngineError` if this process cannot serve."""
        if self._thread.failure:
            raise EngineError(f"the engine has stopped: {self._thread.failure}")
        if self.core.broken:
            raise EngineError(f"the engine cannot serve: {self.core.broken}")

    async def metrics(self) -> Mapping[str, float]:
        """Return current gauges, and the speed since the last call. Responds even while a step is running."""
        generator = self.core.generator
        now, (then, tokens) = time.monotonic(), self._last
        self._last = (now, generator.counts.new_tokens)
        running = list(generator.scheduler.running)
        return {
            "engine/tokens_per_s": (generator.counts.new_tokens - tokens) / max(now - then, 1e-9),
            "engine/running": float(len(running)),
            "engine/queued": float(len(generator.scheduler.waiting)),
            "engine/kv_tokens": float(sum(row.length for row in running)),
            "engine/kv_bytes": float(generator.cache.num_bytes),
            "engine/requests": float(generator.counts.requests),
            "engine/prompt_tokens": float(generator.counts.prompt_tokens),
            "engine/new_tokens": float(generator.counts.new_tokens),
            "engine/steps": float(generator.counts.steps),
            "engine/busy_s": generator.counts.busy_s,
        }

    async def close(self) -> None:
        """End the thread; open requests get no answer."""
        await asyncio.to_thread(self._thread.close)
