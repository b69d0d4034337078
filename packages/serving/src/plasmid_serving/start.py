"""Starts an engine: from settings and a `Dialect` to servers that answer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from plasmid.components import BuildContext
from plasmid.errors import ConfigError
from plasmid.protocols import Actor, Bundle, Resources
from plasmid.utils.waiting import together

from .connection import ServerConnection
from .dialect import Dialect
from .engine import ACTOR_S, ServersEngine, folder_of, start_limit_s
from .processes.actor import ServerActor
from .processes.handles import AttachedServer, OwnServer, ServerHandle
from .processes.machines import NodeActor, by_machine
from .processes.server import ServerOptions
from .settings import ServersConfig
from .supervisor import ManagedServer


async def start_engine(settings: ServersConfig, context: BuildContext, dialect: Dialect) -> ServersEngine:
    """Start every server of the placement, or attach to those at `urls`. Raises `ConfigError`, `EngineError`."""
    servers = await (attach_servers if settings.urls else start_servers)(settings, context, dialect)
    return ServersEngine(servers, settings, context, dialect)


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
    async def start(index: int, handle: ServerHandle) -> ManagedServer:
        started = await handle.start(timeout_s=start_limit_s(context.config))
        connection = ServerConnection(dialect, started, api_key, is_attached=is_attached)
        return ManagedServer(index, f"{context.engine_name}-{index}", handle, connection)

    return await together(start(i, handle) for i, handle in enumerate(handles))
