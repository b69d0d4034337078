"""Starts an engine: from settings and a `Dialect` to servers that answer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from plasmid.components import BuildContext
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.protocols import Actor, Bundle, Resources
from plasmid.utils.waiting import together

from .connection import ServerConnection, Started
from .dialect import Dialect
from .engine import EngineOptions, ServersEngine
from .planner import Planner
from .processes.actor import ServerActor
from .processes.handles import AttachedServer, OwnServer, ServerHandle
from .processes.machines import NodeActor, by_machine
from .processes.server import ServerOptions
from .settings import ServersConfig
from .supervisor import ManagedServer
from .weights.command import Transport

ACTOR_S = 120.0
"""Time limit of the start of an actor itself."""


async def start_engine(settings: ServersConfig, context: BuildContext, dialect: Dialect) -> ServersEngine:
    """Start every server of the placement, or attach to those at `urls`. Raises `ConfigError`, `EngineError`."""
    servers = await (attach_servers if settings.urls else start_servers)(settings, context, dialect)
    return make_engine(settings, context, dialect, servers)


async def start_servers(settings: ServersConfig, context: BuildContext, dialect: Dialect) -> list[ManagedServer]:
    """Start one server for every `gpus_per_engine` bundles."""
    size, bundles = settings.gpus_per_engine, context.bundles
    api_key, control_key = secrets.token_urlsafe(32), secrets.token_bytes(32)

    async def start_actor(factory: type, name: str, own: tuple[Bundle, ...], *args: object) -> Actor:
        options = ServerOptions(
            name=name,
            dialect=dialect,
            host=settings.host,
            folder=folder_of(context) / name,
            log_file=context.run_dir.absolute() / "logs" / f"{name}-server.log",
            start_s=context.config.placement.start_timeout_s,
            env={} if context.on_gpu else {"OMP_NUM_THREADS": str(context.threads), "CUDA_VISIBLE_DEVICES": ""},
            api_key=api_key,
            control_key=control_key,
        )
        resources = Resources(bundles=own, env={"OMP_NUM_THREADS": "1"})
        return await context.cluster.start(factory, options, *args, name=name, resources=resources, timeout_s=ACTOR_S)

    def handle_of(index: int) -> OwnServer:
        name = f"{context.engine_name}-{index}"
        first, *others = by_machine(bundles[index * size : (index + 1) * size])
        nodes: list[Actor] = []

        async def make() -> Actor:
            await together(node.stop(grace_s=0.1) for node in nodes)
            ranked = enumerate(others, 1)
            nodes[:] = await together(start_actor(NodeActor, f"{name}-node-{i}", own) for i, own in ranked)
            return await start_actor(ServerActor, name, first, tuple(nodes))

        return OwnServer(make)

    count = len(bundles) // size
    return await _connect([handle_of(i) for i in range(count)], context, dialect, api_key, is_attached=False)


async def attach_servers(settings: ServersConfig, context: BuildContext, dialect: Dialect) -> list[ManagedServer]:
    """Attach to servers that others run. Raises `ConfigError` if the variable with their key is not set."""
    variable = settings.api_key_env
    api_key = os.environ.get(variable, "") if variable else ""
    if variable and not api_key:
        raise ConfigError(f"rollout.api_key_env: {variable} is not set in the environment")
    handles = [AttachedServer(dialect, url, api_key) for url in settings.urls]
    return await _connect(handles, context, dialect, api_key, is_attached=True)


async def _connect(
    handles: Sequence[ServerHandle],
    context: BuildContext,
    dialect: Dialect,
    api_key: str,
    *,
    is_attached: bool,
) -> list[ManagedServer]:
    start_s = start_limit_s(context.config)

    def connect(started: Started) -> ServerConnection:
        return ServerConnection(dialect, started, api_key, is_attached=is_attached)

    async def start(index: int, handle: ServerHandle) -> ManagedServer:
        started = await handle.start(timeout_s=start_s)
        return ManagedServer(index, f"{context.engine_name}-{index}", handle, connect, connect(started))

    return await together(start(i, handle) for i, handle in enumerate(handles))


def make_engine(
    settings: ServersConfig, context: BuildContext, dialect: Dialect, servers: list[ManagedServer]
) -> ServersEngine:
    """Make the engine over servers that run."""
    config, on_gpu, folder = context.config, context.on_gpu, folder_of(context)
    limit_s = config.run.sync_timeout_s
    planner = Planner(
        transport=transport_of(settings, config, on_gpu=on_gpu),
        folder=folder,
        timeout_s=limit_s,
        read_back_every=settings.read_back_every,
        flush_cache=settings.pause_mode != "in_place" or settings.recompute_kv,
        backend="nccl" if on_gpu else "gloo",
    )
    options = EngineOptions(
        settings=settings,
        dialect=dialect,
        dtype="auto" if settings.urls else settings.number_type(on_gpu=on_gpu),
        sync_s=limit_s,
        start_s=start_limit_s(config),
        can_sleep=config.placement.offload_engine and on_gpu and not settings.urls,
        folder=folder,
        router_log=context.run_dir.absolute() / "logs" / f"{context.engine_name}-router.log",
        api_key=servers[0].connection.api.key,
    )
    return ServersEngine(servers, planner, options)


def folder_of(context: BuildContext) -> Path:
    """Return the engine's folder in the run folder."""
    return context.run_dir.absolute() / f"{context.engine_name}s"


def start_limit_s(config: RunConfig) -> float:
    """Return the time limit of the start of a server, its actor included."""
    return config.placement.start_timeout_s + ACTOR_S


def transport_of(settings: ServersConfig, config: RunConfig, *, on_gpu: bool) -> Transport:
    """Return how weights travel. Raises `ConfigError` if they cannot."""
    place = config.placement
    transport: Transport
    if settings.urls:
        transport = "disk"
    elif settings.wire != "auto":
        transport = settings.wire
    elif not on_gpu:
        transport = "disk"
    else:
        transport = "ipc" if place.colocated else "broadcast"
    if transport == "ipc" and (not on_gpu or place.trainer_ranks < place.engine_ranks):
        raise ConfigError(
            'rollout.wire: "ipc" needs a trainer rank on the GPU of every engine rank; '
            f"there are {place.trainer_ranks} and {place.engine_ranks}, set another wire"
        )
    return transport
