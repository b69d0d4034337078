"""What lives in each engine process: the surface that clients, the driver and trainer ranks call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from plasmid.errors import ConfigError, EngineError
from plasmid.protocols import Bucket, PauseMode
from plasmid.types import Completion, GenerateRequest, StopReason, SyncReceipt
from tokenizers import Tokenizer

from ..generation.generator import Generator
from ..generation.scheduler import Limits
from ..model.cache import round_up
from ..model.language_model import kv_bytes_per_token, load_model
from ..settings import HF
from .completion_queues import CompletionQueues
from .core import EngineCore
from .session_routes import SessionRoutes
from .thread import EngineThread

COLLECT_S = 20.0
"""Maximum time of one `collect` call without a completion; then the client calls again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What one engine process is started with."""

    settings: HF
    model_path: str
    tokenizer_path: str
    trust_remote_code: bool
    max_length: Literal["auto"] | int
    on_gpu: bool
    threads: int
    num_engines: int

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and cache."""
        name = self.settings.dtype
        if name == "auto":
            name = "bfloat16" if self.on_gpu else "float32"
        return cast(torch.dtype, getattr(torch, name))


class EngineWorker:
    """One model in one process. Methods are called by actors' handles; all may run at once."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._completions = CompletionQueues()
        self._routes = SessionRoutes(options.num_engines)
        self._open: dict[str, str] = {}
        """Request -> client, of what has not been answered."""
        self._core: EngineCore | None = None
        self._last = (time.monotonic(), 0)
        self._thread = EngineThread(self._make, num_threads=options.threads, on_failure=self._failed)
        self._thread.started.result()

    def _make(self) -> EngineCore:
        options, settings = self._options, self._options.settings
        model = load_model(
            Path(options.model_path),
            dtype=options.dtype,
            device=torch.device("cuda" if options.on_gpu else "cpu"),
            trust_remote_code=options.trust_remote_code,
        )
        bytes_per_token = kv_bytes_per_token(model)
        longest = model.facts.max_positions
        max_length = longest if options.max_length == "auto" else min(longest, options.max_length)
        limits = Limits(
            max_batch=settings.max_batch,
            prefill_tokens=settings.prefill_tokens,
            kv_tokens=kv_limit(settings, model.device, max_length, bytes_per_token),
        )
        tokenizer = load_tokenizer(Path(options.tokenizer_path))
        generator = Generator(model, limits, kv_block=settings.kv_block, max_length=max_length, tokenizer=tokenizer)
        self._core = EngineCore(generator, recompute_kv=settings.recompute_kv)
        return self._core

    @property
    def core(self) -> EngineCore:
        """What the thread drives."""
        assert self._core is not None
        return self._core

    async def _run_between_steps(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._thread.submit(work))

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
            self._check(self._thread.submit(partial(self.core.leave, ended_sessions)))

    def _check(self, answer: Future[None]) -> None:
        """Raise at once if the thread takes nothing any more; otherwise there is nothing to wait for."""
        if answer.done():
            answer.result()

    def _deliver(self, completion: Completion) -> None:
        self._completions.put(self._open.pop(completion.request_id), completion)

    def _failed(self, failure: str) -> None:
        """Fail all open requests: the thread has ended."""
        for request_id in list(self._open):
            self._deliver(
                Completion(
                    request_id=request_id,
                    token_ids=np.zeros(0, np.int32),
                    logprobs=np.zeros(0, np.float32),
                    versions=(),
                    stop_reason=StopReason.ERROR,
                    error=f"the engine has ended: {failure}",
                )
            )

    async def collect(self, client: str) -> list[Completion]:
        """Completions of a client's requests, as soon as there are any; none after a while without."""
        return await self._completions.collect(client, wait_s=COLLECT_S)

    async def route(self, session_ids: Sequence[str]) -> list[int]:
        """Engine of each session; called on the first engine only."""
        return self._routes.find(session_ids)

    async def forget(self, session_ids: Sequence[str]) -> None:
        """Remove the routes of ended sessions; called on the first engine only."""
        self._routes.forget(session_ids)

    async def expect(self, session_ids: Sequence[str]) -> None:
        """See `RolloutEngine.expect`."""
        await self._run_between_steps(partial(self.core.expect, session_ids))

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """See `EngineClient.abort`."""
        await self._run_between_steps(partial(self.core.abort, request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await self._run_between_steps(partial(self.core.pause, mode))

    async def resume(self) -> None:
        """See `RolloutEngine.resume`. Raises `SyncError`."""
        await self._run_between_steps(self.core.resume)

    async def receive(self, token: str, version: int, limit_s: float) -> SyncReceipt:
        """Wait for the end of a weight sync. Raises `SyncError`, also if it takes longer than the limit."""
        receipt = self._thread.submit(partial(self.core.receive, token, version))
        try:
            async with asyncio.timeout(limit_s):
                return cast(SyncReceipt, await asyncio.wrap_future(receipt))
        except TimeoutError:
            reason = f"weight sync of version {version}: not complete within {limit_s:g} s"
            await self._run_between_steps(partial(self.core.fail_update, token, reason))
            return cast(SyncReceipt, await self._run_between_steps(partial(self.core.receive, token, version)))

    async def put_bucket(self, token: str, version: int, header: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        """Take some weights of a weight sync; returns when they are in the model. Raises `SyncError`."""
        # arrays out of a shared store are read-only, which torch does not support
        own = torch.from_numpy(data if data.flags.writeable else data.copy())
        await self._run_between_steps(partial(self.core.put_bucket, token, version, Bucket(**header, data=own)))

    async def finish_update(self, token: str, version: int, ok: bool) -> None:
        """The sender is done, or has given up. Raises `SyncError`."""
        await self._run_between_steps(partial(self.core.finish_update, token, version, ok=ok))

    async def checksums(self) -> Mapping[str, int]:
        """See `RolloutEngine.checksum`."""
        return cast(Mapping[str, int], await self._run_between_steps(self.core.checksums))

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        await self._run_between_steps(self.core.sleep)

    async def wake(self, kv_cache: bool) -> None:
        """See `RolloutEngine.wake`."""
        await self._run_between_steps(partial(self.core.wake, kv_cache=kv_cache))

    async def health(self) -> None:
        """Raises `EngineError` if this process cannot serve."""
        if self._thread.failure:
            raise EngineError(f"the engine has ended: {self._thread.failure}")
        if self.core.broken:
            raise EngineError(f"the engine cannot serve: {self.core.broken}")

    async def metrics(self) -> Mapping[str, float]:
        """Gauges now, and the speed since the last call. Answers while a step is under way."""
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
        """End the thread; open requests are not answered any more."""
        await asyncio.to_thread(self._thread.close)


def kv_limit(settings: HF, device: torch.device, max_length: int, bytes_per_token: int) -> int | None:
    """Tokens that the cache may hold. Raises `ConfigError` if that is less than one request may take."""
    needed = round_up(max_length, settings.kv_block)
    if settings.kv_tokens != "auto":
        limit = settings.kv_tokens
    elif device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        limit = int(free * settings.kv_memory_fraction) // bytes_per_token
    else:
        return None
    if limit < needed:
        raise ConfigError(
            f"rollout.kv_tokens: the cache holds {limit} tokens, one request may take {needed}; lower model.max_length "
            "or allow more"
        )
    return limit


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The folder's fast tokenizer; None if it has none."""
    file = path / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None
