"""From settings to servers that answer."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plasmid.components import BuildContext
from plasmid.config import RunConfig
from plasmid.errors import ConfigError
from plasmid.protocols import Actor, Bundle, Resources, RolloutEngine
from plasmid.training.model_folder import is_torch_dist
from plasmid.waiting import together

from .actor import EngineServer, Follower, Started
from .api import Api
from .bulletin import BulletinFile
from .control import ControlClient
from .engine import EngineOptions, SGLangEngine
from .exactness import exact_arguments
from .external import ExternalServer, FolderCommands
from .followers import by_machine
from .loader import NAME
from .members import Member, Watch
from .planning import Planner
from .process import ServerOptions
from .receiving import Commands
from .schema import installed_version
from .settings import SGLang
from .transport import Kind

log = logging.getLogger(__name__)
ACTOR_S = 120.0
"""Longest time for an actor itself to come up."""
ON_CPU: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 16384,
}
"""Server arguments without a GPU, unless the recipe says otherwise; memory is not to be filled with a KV cache."""


async def start_engine(settings: SGLang, context: BuildContext) -> RolloutEngine:
    """Start every server of the placement. Raises `ConfigError`, `EngineError`."""
    if not settings.urls and installed_version("sglang") is None:
        raise ConfigError('rollout.kind: SGLang is not installed; install "plasmid-sglang[server]"')
    exact = settings.deterministic or settings.true_on_policy
    if exact and not settings.urls and not context.on_gpu:
        mode = "true_on_policy" if settings.true_on_policy else "deterministic"
        raise ConfigError(
            f"rollout.{mode}: SGLang's deterministic kernels run on GPUs only, and there is none; remove it"
        )
    if settings.true_on_policy:
        log.warning(
            "rollout.true_on_policy: needs a trainer with SGLang's kernels; with this one, trainer and engine differ "
            "more than without it (log-probabilities by 0.017 in the mean instead of 0.008 on an H100)"
        )
    members = await (attach_members if settings.urls else start_members)(settings, context)
    return put_together(settings, context, members)


async def start_members(settings: SGLang, context: BuildContext) -> list[Member]:
    """The servers, one for every `gpus_per_engine` bundles."""
    size, bundles, place = settings.gpus_per_engine, context.bundles, context.config.placement
    on_gpu = context.on_gpu
    api_key, control_key = secrets.token_urlsafe(32), secrets.token_bytes(32)
    arguments = server_arguments(settings, context.config, on_gpu=on_gpu)

    def options_of(name: str) -> ServerOptions:
        return ServerOptions(
            name=name,
            arguments=arguments,
            host=settings.host,
            folder=folder_of(context) / name,
            log_file=context.run_dir.absolute() / "logs" / f"{name}-server.log",
            start_s=place.start_timeout_s,
            env=environment(context.threads, on_gpu=on_gpu),
            api_key=api_key,
            control_key=control_key,
        )

    async def start_actor(factory: type, name: str, own: tuple[Bundle, ...], *args: object) -> Actor:
        resources = Resources(bundles=own, env={"OMP_NUM_THREADS": "1"})
        return await context.cluster.start(
            factory, options_of(name), *args, name=name, resources=resources, timeout_s=ACTOR_S
        )

    async def start(index: int) -> Member:
        name = f"{context.engine_name}-{index}"
        first, *others = by_machine(bundles[index * size : (index + 1) * size])
        followers: list[Actor] = []

        async def make() -> Actor:
            await together(follower.stop(grace_s=0.1) for follower in followers)
            nodes = enumerate(others, 1)
            followers[:] = await together(start_actor(Follower, f"{name}-node-{i}", own) for i, own in nodes)
            return await start_actor(EngineServer, name, first, tuple(followers))

        actor = await make()
        started: Started = await actor.call("start", timeout_s=place.start_timeout_s + ACTOR_S)
        api = Api(started.url, api_key)
        commands = Commands(api, started.abilities, ControlClient(started.control))
        return Member(index, name, actor, make, api, commands)

    return await together(start(i) for i in range(len(bundles) // size))


async def attach_members(settings: SGLang, context: BuildContext) -> list[Member]:
    """The servers that somebody else runs. Raises `ConfigError` if the variable with their key is not set."""
    model_path = Path(context.config.model.path).absolute()
    wanted = exact_arguments(settings, context.config)
    variable = settings.api_key_env
    api_key = os.environ.get(variable, "") if variable else ""
    if variable and not api_key:
        raise ConfigError(f"rollout.api_key_env: {variable} is not set in the environment")

    async def attach(index: int, url: str) -> Member:
        name = f"{context.engine_name}-{index}"

        async def make() -> Actor:
            return await context.cluster.start(
                ExternalServer, url, api_key, model_path, wanted, name=name, resources=Resources(), timeout_s=ACTOR_S
            )

        actor = await make()
        started: Started = await actor.call("start", timeout_s=ACTOR_S)
        api = Api(started.url, api_key)
        commands = FolderCommands(api, started.abilities, ControlClient(started.control))
        return Member(index, name, actor, make, api, commands)

    return await together(attach(i, url) for i, url in enumerate(settings.urls))


def put_together(settings: SGLang, context: BuildContext, members: list[Member]) -> SGLangEngine:
    """The engine over servers that run."""
    config, on_gpu, folder = context.config, context.on_gpu, folder_of(context)
    limit_s = config.run.sync_timeout_s
    planner = Planner(
        kind=wire_kind(settings, config, on_gpu=on_gpu),
        folder=folder,
        timeout_s=limit_s,
        read_back_every=settings.read_back_every,
        flush_cache=settings.pause_mode != "in_place" or settings.recompute_kv,
        on_gpu=on_gpu,
    )
    watch = Watch(
        interval_s=settings.health_interval_s,
        timeout_s=settings.health_timeout_s,
        failures=settings.health_failures,
        max_restarts=settings.max_restarts,
        min_engines=settings.min_engines,
        start_s=config.placement.start_timeout_s + ACTOR_S,
    )
    options = EngineOptions(
        settings=settings,
        dtype="auto" if settings.urls else dtype_of(settings, on_gpu=on_gpu),
        sync_s=limit_s,
        can_sleep=config.placement.offload_engine and on_gpu and not settings.urls,
        watch=watch,
        folder=folder,
        log_file=context.run_dir.absolute() / "logs" / f"{context.engine_name}-router.log",
        api_key=members[0].api.key,
    )
    return SGLangEngine(members, planner, BulletinFile(folder / "bulletin.json"), options)


def folder_of(context: BuildContext) -> Path:
    """Where the run keeps what is the engine's."""
    return context.run_dir.absolute() / f"{context.engine_name}s"


def dtype_of(settings: SGLang, *, on_gpu: bool) -> str:
    """Of weights and cache."""
    return settings.dtype if settings.dtype != "auto" else "bfloat16" if on_gpu else "float32"


def server_arguments(settings: SGLang, config: RunConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Fields of ``ServerArgs`` that every server has in common."""
    model = config.model
    own = (set_.sampling for set_ in config.eval if set_.sampling is not None)
    wants_text = any(sampling.stop for sampling in (*config.samplings().values(), *own))
    arguments: dict[str, Any] = {
        "model_path": str(Path(model.path).absolute()),
        "tokenizer_path": str(Path(model.tokenizer_path).absolute()),
        "trust_remote_code": model.trust_remote_code,
        "device": "cuda" if on_gpu else "cpu",
        "dtype": dtype_of(settings, on_gpu=on_gpu),
        "tp_size": settings.gpus_per_engine // int(settings.server_args.get("pp_size", 1)),
        "random_seed": config.run.seed,
        "weight_version": "0",
        "custom_weight_loader": [NAME],
        "skip_server_warmup": True,
        "skip_tokenizer_init": not wants_text,
        "log_level": "info",
    }
    if is_torch_dist(Path(model.path)):
        arguments["load_format"] = "dummy"  # weights that it does not read; the trainer sends them before all else
    if model.max_length != "auto":
        arguments["context_length"] = model.max_length
    arguments |= exact_arguments(settings, config)
    if config.placement.offload_engine and on_gpu:
        arguments["enable_memory_saver"] = True
    return arguments | ({} if on_gpu else dict(ON_CPU)) | dict(settings.server_args)


def environment(threads: int, *, on_gpu: bool) -> dict[str, str]:
    """Of the server's processes."""
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # a paused server is healthy, and would not draw the token that this look asks for
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    return env if on_gpu else env | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}


def wire_kind(settings: SGLang, config: RunConfig, *, on_gpu: bool) -> Kind:
    """How weights travel. Raises `ConfigError` if they cannot."""
    place = config.placement
    kind: Kind
    if settings.urls:
        kind = "disk"
    elif settings.wire != "auto":
        kind = settings.wire
    elif not on_gpu:
        kind = "disk"
    else:
        kind = "ipc" if place.colocated else "broadcast"
    if kind == "ipc" and (not on_gpu or place.trainer_ranks < place.engine_ranks):
        raise ConfigError(
            'rollout.wire: "ipc" needs a trainer rank on the GPU of every engine rank; '
            f"there are {place.trainer_ranks} and {place.engine_ranks}, set another wire"
        )
    return kind
