"""The dialect of Plasmid's own server around vLLM's engine (`server`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plasmid.components import BuildContext
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError, EngineError
from plasmid.protocols import PauseMode
from plasmid.types import Completion, GenerateRequest
from plasmid_models.folder import is_torch_dist
from plasmid_serving.api import HttpApi
from plasmid_serving.dialect import HttpRequest, Load, Program, ServerInfo, StartOptions

from . import completions
from .completions import GRAMMARS, TIES
from .settings import LARGEST_SET, RELEASE, VLLM

ON_CPU: Mapping[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,  # otherwise the cache fills the memory
    "enable_chunked_prefill": False,  # after a part of a prompt, vLLM rewinds the request's generator: only on GPUs
}
"""Server arguments without a GPU, unless the recipe sets them."""
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the sampler of the newer model runner cannot be replaced
}
ENVIRONMENT_ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # otherwise all servers bind to the same cores
EAGER_ON_CPU = {"TORCHDYNAMO_DISABLE": "1"}  # otherwise the first request waits for the sampler to compile
DISTRIBUTIONS = ("vllm", "vllm-cpu")
VERSION_S = 60.0
"""Time limit for reading the version of vLLM in another environment, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMDialect:
    """Implements `Dialect`."""

    arguments: Mapping[str, Any]
    """Fields of ``AsyncEngineArgs``."""
    worker: str
    """Worker class."""
    ranks: int
    python: str
    environment: Mapping[str, str]

    def launch(self, start: StartOptions) -> Program:
        """Return the command of the server."""
        arguments = {
            "host": start.host,
            "port": start.port,
            "name": start.name,
            "engine": self.arguments,
            "worker": self.worker,
            "ranks": self.ranks,
        }
        return Program("plasmid_vllm.launch:serve", arguments, self.python)

    async def served_name(self, api: HttpApi) -> str:
        """Return the name of the server."""
        return str((await api.get("/info"))["name"])

    async def describe(self, api: HttpApi) -> ServerInfo:
        """Read the release and parallel sizes."""
        info = await api.get("/info")
        return ServerInfo(release=info["release"], context_length=info["context_length"], ranks=info["ranks"])

    async def check_attached(self, api: HttpApi, info: ServerInfo) -> None:
        """Refuse: see `VLLM.find_errors`."""
        raise EngineError(f"rollout.urls: {api.url}: vLLM servers that the run did not start cannot receive weights")

    async def loads(self, api: HttpApi) -> tuple[Load, ...]:
        """Return the load of the scheduler."""
        found = await api.get("/loads")
        queries = found["cache_queries"]
        fractions = {"kv_usage": found["kv_usage"], "cache_hit_rate": found["cache_hits"] / queries if queries else 0.0}
        counts = {name: float(found[name]) for name in ("running", "queued", "tokens", "seconds")}
        return (Load(**counts, fractions=fractions),)

    async def pause(self, api: HttpApi, mode: PauseMode) -> None:
        """Pause generation. With ``wait`` the engine has already made sure that no request runs."""
        await api.post("/pause", {"mode": "keep" if mode == "in_place" else "abort"})

    async def resume(self, api: HttpApi) -> None:
        """Undo `pause`."""
        await api.post("/resume")

    async def set_memory(self, api: HttpApi, parts: AbstractSet[str], *, is_held: bool) -> None:
        """Allocate or release GPU memory."""
        await api.post("/memory", {"parts": sorted(parts), "is_held": is_held})

    async def begin_update(self, api: HttpApi, info: ServerInfo) -> None:
        """Do nothing: an update is one call."""

    async def end_update(self, api: HttpApi, info: ServerInfo) -> None:
        """Do nothing."""

    async def update(
        self, api: HttpApi, info: ServerInfo, message: bytes, *, version: int | None, flush_cache: bool
    ) -> None:
        """Have the workers execute the message."""
        body = {"message": message.decode(), "version": version, "flush_cache": flush_cache}
        await api.post("/update", body)

    async def load_folder(self, api: HttpApi, folder: Path, *, version: int, flush_cache: bool) -> None:
        """Refuse: see `check_attached`."""
        raise EngineError(f"{api.url}: vLLM servers that the run did not start cannot receive weights")

    def request(self, request: GenerateRequest, *, rid: str, max_new_tokens: int) -> HttpRequest:
        """Build a request for ``/generate``."""
        return HttpRequest(
            "/generate", completions.request_body(request, rid=rid, max_new_tokens=max_new_tokens), headers={}
        )

    def completion(self, request: GenerateRequest, status: int, answer: Any) -> Completion:
        """Convert a response to a completion."""
        return completions.completion(request, status, answer)

    async def abort(self, api: HttpApi, prefixes: Sequence[str] | Literal["all"]) -> None:
        """Abort requests."""
        await api.post("/abort", {"prefixes": prefixes if prefixes == "all" else list(prefixes)})


def make_dialect(settings: VLLM, context: BuildContext) -> VLLMDialect:
    """Create the dialect for servers with these settings. Raises `ConfigError` if they cannot be started."""
    release = installed_release(settings.python)
    if release is None:
        raise ConfigError(
            f"rollout.{'python' if settings.python else 'kind'}: vLLM is not installed"
            f"{' for ' + repr(settings.python) if settings.python else ''}; install 'plasmid-vllm[server]' there"
        )
    if not release.startswith(f"{RELEASE}."):
        raise ConfigError(f"rollout.kind: vLLM {release} is not supported; install 'vllm>={RELEASE},<0.33'")
    on_gpu = context.on_gpu
    arguments = server_arguments(settings, context.config, on_gpu=on_gpu)
    environment = ENVIRONMENT | ({} if on_gpu else ENVIRONMENT_ON_CPU)
    if not on_gpu and arguments["enforce_eager"]:
        environment |= EAGER_ON_CPU
    return VLLMDialect(
        arguments=arguments,
        worker=worker_name(on_gpu=on_gpu, records_experts=context.config.trainer.replays_routing()),
        ranks=settings.gpus_per_engine,
        python=str(Path(settings.python).absolute()) if settings.python else "",
        environment=environment,
    )


def worker_name(*, on_gpu: bool, records_experts: bool) -> str:
    """Return the worker class."""
    module, device = ("gpu", "Gpu") if on_gpu else ("cpu", "Cpu")
    return f"plasmid_vllm.worker_process.{module}.{device}{'Recording' if records_experts else 'Policy'}Worker"


def installed_release(python: str) -> str | None:
    """Return the version of vLLM in an interpreter's environment; None if it is not installed there."""
    code = (
        "from importlib.metadata import distributions\n"
        f"print(*(d.version for d in distributions() if d.name in {DISTRIBUTIONS}))"
    )
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", code], capture_output=True, text=True, timeout=VERSION_S, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"rollout.python: cannot run {python!r}: {error}") from None
    return next(iter(done.stdout.split()), None)


def server_arguments(settings: VLLM, config: RunConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Return the fields of ``AsyncEngineArgs`` that all servers share."""
    model = config.model
    own = (set_.sampling for set_ in config.eval if set_.sampling is not None)
    wants_text = any(
        sampling.stop or not GRAMMARS.keys().isdisjoint(sampling.optional)
        for sampling in (*config.samplings().values(), *own)
    )
    arguments: dict[str, Any] = {
        "model": str(Path(model.path).absolute()),
        "tokenizer": str(Path(model.tokenizer_path).absolute()),
        "trust_remote_code": model.trust_remote_code,
        "dtype": settings.number_type(on_gpu=on_gpu),
        "tensor_parallel_size": settings.gpus_per_engine,
        "seed": config.run.seed,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": LARGEST_SET + TIES,
        "skip_tokenizer_init": not wants_text,
    }
    if is_torch_dist(Path(model.path)):
        arguments["load_format"] = "dummy"  # skip reading weights; the trainer sends them before anything else
    if model.max_length != "auto":
        arguments["max_model_len"] = model.max_length
    if config.placement.offload_engine and on_gpu:
        arguments["enable_sleep_mode"] = True
    return arguments | ({} if on_gpu else dict(ON_CPU)) | dict(settings.server_args)
