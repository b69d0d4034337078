"""HTTP server around vLLM's engine, in vLLM's process. vLLM's own server accepts weights only in its development
mode."""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web
from vllm import SamplingParams, __version__
from vllm.exceptions import VLLMError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from .completions import EXPERTS_FROM, encode_completion

MAX_BYTES = 64 << 20
"""Maximum size of a request, in bytes."""
Handler = Callable[[Any], Awaitable[Any]]


@dataclass(slots=True)
class EngineLoad:
    """Gauges and counters of the engine since its start; the dialect reads them as a `Load`."""

    running: int = 0
    queued: int = 0
    tokens: int = 0
    seconds: float = 0.0
    kv_usage: float = 0.0
    cache_queries: int = 0
    cache_hits: int = 0


class Gauges(StatLoggerBase):  # type: ignore[misc]
    """Collects vLLM's statistics of each step."""

    def __init__(self, load: EngineLoad) -> None:
        self._load, self._before = load, time.monotonic()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        """Add one step. The time since the previous step counts if requests were running."""
        now, load = time.monotonic(), self._load
        if load.running:
            load.seconds += now - self._before
        self._before = now
        if iteration_stats is not None:
            load.tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            load.running, load.queued = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            load.kv_usage = scheduler_stats.kv_cache_usage
            load.cache_queries += scheduler_stats.prefix_cache_stats.queries
            load.cache_hits += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        """Do nothing."""


class Server:
    """Answers requests that carry the API key."""

    engine: AsyncLLM | None = None
    """Set once the model is loaded."""

    def __init__(self, name: str, api_key: str, *, ranks: int) -> None:
        self.load = EngineLoad()
        self._name, self._ranks = name, ranks
        self._wanted = f"Bearer {api_key}".encode()
        self._open: set[str] = set()
        self._tasks: set[asyncio.Task[bytes]] = set()
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[self._check])
        app.router.add_get("/info", self._answer(self._info))
        app.router.add_get("/loads", self._answer(self._loads))
        for handler in (self._generate, self._abort, self._pause, self._resume, self._update, self._memory):
            app.router.add_post(f"/{handler.__name__.removeprefix('_')}", self._answer(handler))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)

    async def listen(self, host: str, port: int) -> None:
        """Start listening."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        found = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(found, self._wanted):
            raise web.HTTPUnauthorized
        if self.engine is None:
            raise web.HTTPServiceUnavailable
        answer: web.StreamResponse = await handler(request)
        return answer

    def _answer(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            body = await request.json() if request.can_read_body else {}
            try:
                return web.json_response(await handler(body))
            except EngineDeadError:
                raise web.HTTPServiceUnavailable from None
            except (VLLMError, ValueError) as error:
                return web.json_response({"error": str(error)}, status=400)

        return answer

    @property
    def _llm(self) -> AsyncLLM:
        assert self.engine is not None
        return self.engine

    async def _info(self, body: Mapping[str, Any]) -> Any:
        length = self._llm.model_config.max_model_len
        return {"name": self._name, "release": __version__, "context_length": length, "ranks": self._ranks}

    async def _loads(self, body: Mapping[str, Any]) -> Any:
        await self._llm.collective_rpc("check_health")  # the workers answer this
        return asdict(self.load)

    async def _generate(self, body: dict[str, Any]) -> Any:
        rid, fields = body["rid"], body["sampling"]
        fields["logprobs"] = min(fields["logprobs"], self._llm.model_config.get_vocab_size())
        if bias := fields.get("logit_bias"):
            fields["logit_bias"] = {int(token): value for token, value in bias.items()}
        if grammar := fields.get("structured_outputs"):
            fields["structured_outputs"] = StructuredOutputsParams(**grammar)
        sampling = SamplingParams(
            **fields,
            detokenize=bool(fields.get("stop")),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._open.add(rid)
        recorded = fields.get("extra_args")
        try:
            async for output in self._llm.generate(tokens_input(body["token_ids"]), sampling, rid):
                last = output
        except BaseException:
            if recorded:
                self._forget(rid)
            raise
        finally:
            self._open.discard(rid)
        one = last.outputs[0]
        answer = encode_completion(one, with_sets=bool(sampling.logprobs))
        if recorded:
            count = len(body["token_ids"]) + len(one.token_ids) - 1 - recorded[EXPERTS_FROM]
            answer["experts"] = base64.b64encode(await self._take_experts(rid, count)).decode()
        return answer

    async def _take_experts(self, rid: str, count: int) -> bytes:
        """Return the experts of up to ``count`` tokens of a request, which the workers then forget."""
        return b"".join(await self._llm.collective_rpc("take_experts", args=(rid, max(0, count))))

    def _forget(self, rid: str) -> None:
        """Have the workers forget the experts of a request that failed or was cancelled."""
        task = asyncio.create_task(self._take_experts(rid, 0))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _abort(self, body: Mapping[str, Any]) -> None:
        prefixes = body["prefixes"]
        found = [rid for rid in self._open if prefixes == "all" or rid.startswith(tuple(prefixes))]
        await self._llm.abort(found)

    async def _pause(self, body: Mapping[str, Any]) -> None:
        await self._llm.pause_generation(mode=body["mode"], clear_cache=False)

    async def _resume(self, body: Mapping[str, Any]) -> None:
        await self._llm.resume_generation()

    async def _update(self, body: Mapping[str, Any]) -> None:
        await self._llm.collective_rpc("run_command", args=(body["message"].encode(),))
        if body["flush_cache"]:
            await self._llm.reset_prefix_cache(reset_running_requests=True)
        if body["version"] is not None:
            await self._llm.update_weight_version(str(body["version"]))

    async def _memory(self, body: Mapping[str, Any]) -> None:
        parts: list[str] = body["parts"]
        if body["is_held"]:
            await self._llm.wake_up(parts)
        elif "weights" in parts:
            await self._llm.sleep(level=2, mode="keep")
        else:
            await self._llm.release_kv_cache_memory()
