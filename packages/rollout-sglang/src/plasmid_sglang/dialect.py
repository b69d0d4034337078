"""The dialect of SGLang servers (0.5.17 to 0.5.23)."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plasmid.components import BuildContext, kind_of
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError, EngineError
from plasmid.protocols import PauseMode
from plasmid.types import Completion, GenerateRequest, SamplingParams
from plasmid.utils.addresses import LOOPBACK
from plasmid_models.folder import is_torch_dist
from plasmid_serving.api import HttpApi
from plasmid_serving.dialect import HttpRequest, Load, Program, ServerInfo, StartOptions

from . import completions
from .exactness import attached_errors, exact_arguments
from .launch import LOADER, MESSAGE
from .schema import installed_version
from .settings import SGLang

log = logging.getLogger(__name__)
ON_CPU: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 16384,
    "sleep_on_idle": True,
}
"""Server arguments without a GPU, unless the recipe sets them. They limit the KV cache, and prevent a scheduler without
requests from using a core, which the trainer needs."""
FRACTIONS = {"kv_usage": "token_usage", "cache_hit_rate": "cache_hit_rate"}
SPECULATIVE = ("accept_length", "accept_rate")
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # a paused server is healthy but would not generate the token that this check requests
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
"""Environment variables of all servers."""
BALANCE_CHECK = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
"""Variable of a check that refuses to start a server if one of its GPUs has over 10% less free memory than another."""
ABORT_POLL_S = 0.02
"""Interval between aborts before a pause, in seconds."""
ABORT_S = 5.0
"""Maximum time for running requests to end before a pause, in seconds. The pause itself ends those that still run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangDialect:
    """Implements `Dialect`."""

    arguments: Mapping[str, Any]
    """Fields of ``ServerArgs``, except those chosen at each start."""
    router_arguments: Mapping[str, Any]
    model_path: Path
    exact: Mapping[str, Any]
    """Arguments of the modes `deterministic` and `true_on_policy`, which attached servers must have, too."""
    pause_mode: PauseMode
    recompute_kv: bool
    has_router: bool
    is_colocated: bool = False
    """True if servers share their GPUs with the trainer."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment variables of servers."""
        # the trainer's ranks need different amounts of memory; the smallest free amount limits the KV cache of all
        unbalanced = {BALANCE_CHECK: os.environ.get(BALANCE_CHECK, "false")} if self.is_colocated else {}
        return ENVIRONMENT | unbalanced

    def launch(self, start: StartOptions) -> Program:
        """Return the command of SGLang's HTTP server."""
        chosen: dict[str, Any] = {"host": start.host, "port": start.port}
        if start.name:
            chosen["served_model_name"] = start.name
        if start.nodes > 1:
            chosen |= {"nnodes": start.nodes, "node_rank": start.node_rank, "dist_init_addr": start.rendezvous}
        return Program("plasmid_sglang.launch:serve", {**self.arguments, **chosen})

    def launch_router(self, host: str, port: int, metrics_port: int) -> Program:
        """Return the command of SGLang's router."""
        # metrics list all servers and paths and need no key, so they are served on this machine only
        chosen = {"host": host, "port": port, "prometheus_host": LOOPBACK, "prometheus_port": metrics_port}
        return Program("plasmid_sglang.launch:route", {**self.router_arguments, **chosen, "worker_urls": []})

    async def served_name(self, api: HttpApi) -> str:
        """Return the name of the served model."""
        return str((await api.get("/get_server_info")).get("served_model_name"))

    async def describe(self, api: HttpApi) -> ServerInfo:
        """Read the release, parallel sizes and the form of update calls."""
        info, about = await api.get("/get_server_info"), await api.get("/openapi.json")
        models = await api.get("/v1/models")
        update = about["components"]["schemas"].get("UpdateWeightsFromTensorReqInput", {}).get("properties", {})
        features = {
            "sessions": "/begin_weight_update" in about["paths"],  # updates have a begin and an end (0.5.23)
            "selector": "selector" in update,  # updates name the models; earlier releases can exclude the draft model
            "disk_updates": "/update_weights_from_disk" in about["paths"],
        }
        return ServerInfo(
            release=str(info.get("version", "")),
            context_length=int(models["data"][0]["max_model_len"]),
            ranks=int(info.get("tp_size", 1)) * int(info.get("pp_size", 1)),
            features=frozenset(name for name, has in features.items() if has),
        )

    async def check_attached(self, api: HttpApi, info: ServerInfo) -> None:
        """Check the model and the modes, and try an update call."""
        served = await api.get("/model_info")
        own = json.loads((self.model_path / "config.json").read_text())
        for name in ("model_type", "architectures"):
            if name in served and served[name] != own.get(name):
                raise EngineError(
                    f"rollout.urls: {api.url} serves a model with {name} = {served[name]!r}, "
                    f"but model.path has {own.get(name)!r}"
                )
        for line in attached_errors(self.exact, await api.get("/get_server_info"), api.url):
            raise EngineError(line)
        if "disk_updates" not in info.features:
            raise EngineError(f"{api.url}: SGLang {info.release} cannot load weights from disk")
        # this call may require another key (admin_api_key)
        await api.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})

    async def loads(self, api: HttpApi) -> tuple[Load, ...]:
        """Read the load of each scheduler from shared memory. The call before it proves that the schedulers respond."""
        await api.get("/get_server_info")
        return tuple(map(read_load, (await api.get("/v1/loads"))["loads"]))

    async def pause(self, api: HttpApi, mode: PauseMode) -> None:
        """Pause generation; ``retract`` keeps requests but drops their KV cache."""
        if mode == "abort":
            await self._abort_running(api)
        held = "retract" if self.recompute_kv else "in_place"
        await api.post("/pause_generation", {"mode": held if mode == "in_place" else "abort"})

    async def _abort_running(self, api: HttpApi) -> None:
        """Abort requests until none runs in two consecutive checks: one may be in transit at the first.

        SGLang's pause aborts them too, but then sleeps for one second before it looks whether they have ended.
        """
        idle, deadline = 0, time.monotonic() + ABORT_S
        while idle < 2:
            await self.abort(api, "all")
            running = sum(load.running + load.queued for load in await self.loads(api))
            idle = 0 if running else idle + 1
            if running and time.monotonic() > deadline:
                log.warning("%s: %d requests still run %g s after they were aborted", api.url, running, ABORT_S)
                return
            await asyncio.sleep(ABORT_POLL_S)

    async def resume(self, api: HttpApi) -> None:
        """Undo `pause`."""
        await api.post("/continue_generation")

    async def set_memory(self, api: HttpApi, parts: AbstractSet[str], *, is_held: bool) -> None:
        """Allocate or release GPU memory."""
        path = "/resume_memory_occupation" if is_held else "/release_memory_occupation"
        await api.post(path, {"tags": sorted(parts)})

    async def begin_update(self, api: HttpApi, info: ServerInfo) -> None:
        """Begin an update. Ends an abandoned one first."""
        if "sessions" not in info.features:
            return
        try:
            await api.post("/begin_weight_update")
        except EngineError:
            await api.post("/end_weight_update")
            await api.post("/begin_weight_update")

    async def end_update(self, api: HttpApi, info: ServerInfo) -> None:
        """End the update."""
        if "sessions" in info.features:
            await api.post("/end_weight_update")

    async def update(
        self, api: HttpApi, info: ServerInfo, message: bytes, *, version: int | None, flush_cache: bool
    ) -> None:
        """Send the message as a tensor to the custom weight loader."""
        import torch  # not at module level, because its import would delay the start of servers

        tensors = [(MESSAGE, torch.frombuffer(bytearray(message), dtype=torch.uint8))]
        payload = base64.b64encode(pickle.dumps(tensors)).decode()
        body: dict[str, Any] = {"serialized_named_tensors": [payload] * info.ranks, "load_format": LOADER}
        body |= {"flush_cache": flush_cache} | ({} if version is None else {"weight_version": str(version)})
        body |= {"selector": "target"} if "selector" in info.features else {"disable_draft_model": True}
        await api.post("/update_weights_from_tensor", body)

    async def load_folder(self, api: HttpApi, folder: Path, *, version: int, flush_cache: bool) -> None:
        """Load the weights of a folder."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush_cache}
        await api.post("/update_weights_from_disk", body)

    def request(self, request: GenerateRequest, *, rid: str, max_new_tokens: int) -> HttpRequest:
        """Build a request for ``/generate``. The header lets a router find the server that has the session's prefix
        cached."""
        body = completions.request_body(request, rid=rid, max_new_tokens=max_new_tokens, seeded=bool(self.exact))
        return HttpRequest("/generate", body, {"X-SMG-Routing-Key": request.session_id} if self.has_router else {})

    def completion(self, request: GenerateRequest, status: int, answer: Any) -> Completion:
        """Convert a response to a completion. Only paused requests have tokens of several versions."""
        return completions.completion(request, status, answer, has_spans=self.pause_mode == "in_place")

    async def abort(self, api: HttpApi, prefixes: Sequence[str] | Literal["all"]) -> None:
        """Abort requests."""
        bodies = [{"abort_all": True}] if prefixes == "all" else [{"rid": prefix} for prefix in prefixes]
        await asyncio.gather(*(api.post("/abort_request", body) for body in bodies))


def read_load(answer: Mapping[str, Any]) -> Load:
    """Read the load of one scheduler. Decoding speed is computed from ``decode_moments``.

    These are sums over all steps so far: steps, requests, microseconds, two squares, tokens. SGLang's own gauge is 0
    whenever a server is idle.
    """
    speculative = answer.get("speculative") or {}
    found = {name: answer.get(key) for name, key in FRACTIONS.items()}
    found |= {name: speculative.get(name) for name in SPECULATIVE}
    moments = answer.get("decode_moments") or (0,) * 6
    return Load(
        running=float(answer.get("num_running_reqs", 0)),
        queued=float(answer.get("num_waiting_reqs", 0)),
        tokens=float(moments[5]),
        seconds=moments[2] / 1e6,
        fractions={name: float(value) for name, value in found.items() if value is not None},
    )


def make_dialect(settings: SGLang, context: BuildContext) -> SGLangDialect:
    """Create the dialect for servers with these settings. Raises `ConfigError` if they cannot be started."""
    config = context.config
    if not settings.urls and installed_version("sglang") is None:
        raise ConfigError('rollout.kind: SGLang is not installed; install "plasmid-sglang[server]"')
    exact = exact_arguments(settings, kind_of(config.trainer))
    if exact and not settings.urls and not context.on_gpu:
        mode = "true_on_policy" if settings.true_on_policy else "deterministic"
        raise ConfigError(
            f"rollout.{mode}: requires GPUs for SGLang's deterministic kernels, but this machine has none; remove it"
        )
    if settings.true_on_policy:
        log.warning(
            "rollout.true_on_policy: requires a trainer with SGLang's kernels; with this trainer it increases the "
            "mean difference of log-probabilities (0.017 instead of 0.008 on an H100)"
        )
    return SGLangDialect(
        arguments=server_arguments(settings, config, on_gpu=context.on_gpu),
        router_arguments=settings.router_args,
        model_path=Path(config.model.path).absolute(),
        exact=exact,
        pause_mode=settings.pause_mode,
        recompute_kv=settings.recompute_kv,
        has_router=settings.router,
        is_colocated=context.before_loading is not None,
    )


def server_arguments(settings: SGLang, config: RunConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Return the fields of ``ServerArgs`` that all servers share."""
    model = config.model
    own = (set_.sampling for set_ in config.eval if set_.sampling is not None)
    reading = ("stop", "stop_regex", *SamplingParams.GRAMMARS)
    wants_text = any(getattr(s, name) for s in (*config.samplings().values(), *own) for name in reading)
    arguments: dict[str, Any] = {
        "model_path": str(Path(model.path).absolute()),
        "tokenizer_path": str(Path(model.tokenizer_path).absolute()),
        "trust_remote_code": model.trust_remote_code,
        "device": "cuda" if on_gpu else "cpu",
        "dtype": settings.number_type(on_gpu=on_gpu),
        "tp_size": settings.gpus_per_engine // int(settings.server_args.get("pp_size", 1)),
        "random_seed": config.run.seed,
        "weight_version": "0",
        "custom_weight_loader": [LOADER],
        "skip_server_warmup": True,
        "skip_tokenizer_init": not wants_text,
        "log_level": "info",
    }
    if is_torch_dist(Path(model.path)):
        arguments["load_format"] = "dummy"  # skip reading weights; the trainer sends them before anything else
    if config.trainer.replays_routing():
        arguments["enable_return_routed_experts"] = True
    if model.max_length != "auto":
        arguments["context_length"] = model.max_length
    arguments |= exact_arguments(settings, kind_of(config.trainer))
    if config.placement.offload_engine and on_gpu:
        arguments["enable_memory_saver"] = True
    return arguments | ({} if on_gpu else dict(ON_CPU)) | dict(settings.server_args)
