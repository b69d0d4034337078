"""Starts an engine: from settings and a `Dialect` to running servers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from plasmid.components import BuildContext
from plasmid.errors import ConfigError
from plasmid.protocols import Actor, Bundle, Resources
from plasmid.utils.waiting import run_together

from .connection import ServerConnection
from .dialect import Dialect
from .engine import ACTOR_S, ServersEngine, folder_of, start_limit_s
from .processes.actor import ServerActor
from .processes.handles import AttachedServer, OwnServer, ServerHandle
from .processes.machines import NodeActor, group_by_machine
from .processes.server import ServerOptions
from .settings import ServersConfig
from .supervisor import ManagedServer

S = TypeVar("S", bound=ServersConfig)
MakeDialect = Callable[[S, BuildContext], Dialect]
"""Makes the dialect of a server with these settings."""


async def start_engine(settings: S, context: BuildContext, make_dialect: MakeDialect[S]) -> ServersEngine:
    """Start every server of the placement, or attach to those at `urls`. Raises `ConfigError`, `EngineError`."""
    servers = await (attach_servers if settings.urls else start_servers)(settings, context, make_dialect)
    return ServersEngine(servers, settings, context, servers[0].connection.dialect)


async def start_servers(settings: S, context: BuildContext, make_dialect: MakeDialect[S]) -> list[ManagedServer]:
    """Start one server for every `gpus_per_engine` bundles, with the arguments of its group."""
    size, bundles = settings.gpus_per_engine, context.bundles
    count = len(bundles) // size
    if settings.groups:
        dialects = [make_dialect(settings.of_server(i), context) for i in range(count)]
    else:
        dialects = [make_dialect(settings, context)] * count
    secret, control_key = secrets.token_urlsafe(32), secrets.token_bytes(32)

    async def start_actor(factory: type, index: int, node: int, own: tuple[Bundle, ...], *args: object) -> Actor:
        name = f"{context.engine_name}-{index}" + (f"-node-{node}" if node else "")
        options = ServerOptions(
            name=name,
            dialect=dialects[index],
            host=settings.host,
            folder=folder_of(context) / name,
            log_file=context.run_dir.absolute() / "logs" / f"{name}-server.log",
            start_s=context.config.placement.start_timeout_s,
            env={} if context.on_gpu else {"OMP_NUM_THREADS": str(context.threads), "CUDA_VISIBLE_DEVICES": ""},
            secret=secret,
            control_key=control_key,
        )
        resources = Resources(bundles=own, env={"OMP_NUM_THREADS": "1"})
        return await context.cluster.start(factory, options, *args, name=name, resources=resources, timeout_s=ACTOR_S)

    def handle_of(index: int) -> OwnServer:
        first, *others = group_by_machine(bundles[index * size : (index + 1) * size])
        nodes: list[Actor] = []

        async def make() -> Actor:
            await run_together(node.stop(grace_s=0.1) for node in nodes)
            ranked = enumerate(others, 1)
            nodes[:] = await run_together(start_actor(NodeActor, index, i, own) for i, own in ranked)
            return await start_actor(ServerActor, index, 0, first, tuple(nodes))

        return OwnServer(make, context.before_loading)

    handles = [handle_of(i) for i in range(len(dialects))]
    return await _connect(handles, context, dialects, secret, is_attached=False)


async def attach_servers(settings: S, context: BuildContext, make_dialect: MakeDialect[S]) -> list[ManagedServer]:
    """Attach to external servers. Raises `ConfigError` if the variable with their key is not set."""
    variable = settings.api_key_env
    api_key = os.environ.get(variable, "") if variable else ""
    if variable and not api_key:
        raise ConfigError(f"rollout.api_key_env: {variable} is not set in the environment")
    dialect = make_dialect(settings, context)
    handles = [AttachedServer(dialect, url, api_key) for url in settings.urls]
    return await _connect(handles, context, [dialect] * len(handles), api_key, is_attached=True)


async def _connect(
    handles: Sequence[ServerHandle],
    context: BuildContext,
    dialects: Sequence[Dialect],
    secret: str,
    *,
    is_attached: bool,
) -> list[ManagedServer]:
    async def start(index: int, handle: ServerHandle) -> ManagedServer:
        started = await handle.start(timeout_s=start_limit_s(context.config))
        connection = ServerConnection(dialects[index], started, secret, is_attached=is_attached)
        return ManagedServer(index, f"{context.engine_name}-{index}", handle, connection)

    return await run_together(start(i, handle) for i, handle in enumerate(handles))
