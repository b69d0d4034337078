"""Rollout engine on supervised servers of any `Dialect`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from plasmid.components import kind_of
from plasmid.errors import EngineError, SyncError
from plasmid.protocols import PauseMode, SyncPlan
from plasmid.types import SyncResult
from plasmid.utils.waiting import deadline

from .api import HttpApi
from .client import ClientOptions, Endpoints, EndpointsFile, ServersClient
from .dialect import Dialect, Load, RouterDialect
from .planner import Planner
from .processes.router import Router
from .supervisor import Condition, ManagedServer, Supervisor, for_each
from .weights.errors import SyncAbortedError, sync_failure
from .weights.sender import ServersWire

if TYPE_CHECKING:
    from plasmid.components import BuildContext
    from plasmid.config.run import RunConfig

    from .settings import ServersConfig


class Speeds:
    """Decoding speed in tokens per second between two calls.

    Computed from counters, because the servers' own gauges read 0 when idle, as between batches.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], Load] = {}

    def of(self, server: str, loads: Sequence[Load]) -> float:
        """Return the sum over the server's schedulers since the last call; 0 if nothing was decoded."""
        return sum(self._one((server, place), load) for place, load in enumerate(loads))

    def _one(self, key: tuple[str, int], load: Load) -> float:
        before = self._before.get(key, Load())
        if load.tokens < before.tokens or load.seconds < before.seconds:  # the server was restarted
            before = Load()
        self._before[key] = load
        seconds = load.seconds - before.seconds
        return (load.tokens - before.tokens) / seconds if seconds > 0 else 0.0


def gauges(loads: Mapping[str, Sequence[Load]], speeds: Speeds) -> dict[str, float]:
    """Return ``engine/...`` metrics from the loads by server name: sums over schedulers, means of fractions.

    The speed is also given per server.
    """
    every = [load for own in loads.values() for load in own]
    each = {server: speeds.of(server, own) for server, own in loads.items()}
    found = {
        "engine/tokens_per_s": sum(each.values()),
        "engine/running": sum(load.running for load in every),
        "engine/queued": sum(load.queued for load in every),
    }
    for name in dict.fromkeys(name for load in every for name in load.fractions):
        values = [load.fractions[name] for load in every if name in load.fractions]
        found[f"engine/{name}"] = sum(values) / len(values)
    return found | {f"engine/{server}/tokens_per_s": speed for server, speed in each.items()}


ACTOR_S = 120.0
"""Time limit for starting an actor itself, in seconds."""
DRAIN_S = 0.2


class ServersEngine:
    """Implements `RolloutEngine` on servers that are supervised while they serve."""

    def __init__(
        self, servers: list[ManagedServer], settings: ServersConfig, context: BuildContext, dialect: Dialect
    ) -> None:
        """Wrap running servers, which share one secret."""
        config, folder, secret = context.config, folder_of(context), servers[0].connection.secret
        self._settings, self._dialect = settings, dialect
        self._dtype = "auto" if settings.urls else settings.number_type(on_gpu=context.on_gpu)
        self._sync_s = config.run.sync_timeout_s
        self._can_sleep = config.placement.offload_engine and context.on_gpu and not settings.urls
        self._planner = Planner(settings, config, folder, on_gpu=context.on_gpu)
        self.endpoints = EndpointsFile(folder / "endpoints.json")
        self.supervisor = Supervisor(servers, settings, start_s=start_limit_s(config), changed=self._publish_endpoints)
        self._speeds = Speeds()
        self._paused, self._is_open = False, True
        self._asleep: set[str] = set()
        self._error = ""
        options = ClientOptions(
            endpoints=self.endpoints, dialect=dialect, max_requests=settings.max_requests, secret=secret
        )
        self._client = ServersClient(options)
        self._router: Router | None = None
        if settings.has_router():
            log_file = context.run_dir.absolute() / "logs" / f"{context.engine_name}-router.log"
            own = cast(RouterDialect, dialect)
            self._router = Router(
                own, settings.host, secret, folder=folder, log_file=log_file, changed=self._publish_endpoints
            )
        self._publish_endpoints()
        self.supervisor.begin()

    @property
    def client(self) -> ServersClient:
        """Return the client for rollout workers."""
        return self._client

    @property
    def pause_mode(self) -> PauseMode:
        """Return the pause mode before a weight sync."""
        return self._settings.pause_mode

    def needs_weights(self) -> bool:
        """Return whether a restarted server only lacks the current weights. Raises `EngineError`."""
        self.supervisor.check()
        return any(s.condition is Condition.WAITING for s in self.supervisor.all)

    def _publish_endpoints(self) -> None:
        """Publish the servers that rollout workers should call."""
        urls = tuple(s.connection.address for s in self.supervisor.list_serving())
        if self._router is not None:
            self._router.route_to(urls)
            urls = (self._router.address,) if self._router.address and urls else urls
        try:
            self.supervisor.check()
        except EngineError as error:
            self._error = str(error)
        self.endpoints.write(
            Endpoints(
                urls=urls,
                servers=tuple(s.connection.address for s in self.supervisor.list_running()),
                is_open=self._is_open,
                context_length=min((s.connection.info.context_length for s in self.supervisor.all), default=0),
                error=self._error,
            )
        )

    async def expect(self, session_ids: object) -> None:
        """Do nothing: servers with reproducible sampling do not depend on batch composition."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating on every server, and take servers that do not respond out of service.

        Meanwhile clients hold back new requests, which servers would have to end as well, except with ``in_place``.
        Paused servers keep new requests until `resume`.
        """
        self._is_open = mode == "in_place"
        self._publish_endpoints()
        try:
            if mode == "wait" and not self._paused:
                await self._drain()
            self._paused = True
            await self.supervisor.call_running(lambda s: self._dialect.pause(self._api_of(s), mode))
        finally:
            self._is_open = True
            self._publish_endpoints()

    async def _drain(self) -> None:
        """Wait until no server has requests in two consecutive checks: a request may be in transit at the first."""
        idle = 0
        async with deadline(self._sync_s, "engine: requests in progress (run.sync_timeout_s, pause_mode = 'wait')"):
            while idle < 2:
                await asyncio.sleep(DRAIN_S)
                loads: list[Load] = []

                async def read_loads(server: ManagedServer, into: list[Load] = loads) -> None:
                    into += await server.connection.loads(timeout_s=self._settings.health_timeout_s)

                await self.supervisor.call_running(read_loads)
                idle = 0 if any(load.running or load.queued for load in loads) else idle + 1

    async def resume(self) -> None:
        """Undo `pause` on servers with verified weights. Raises `SyncError` if there is none."""
        if not self.supervisor.list_serving():
            self.supervisor.check()
            raise SyncError("the engine cannot resume: no server has a complete version")
        self._paused = False
        failed = await for_each(self.supervisor.list_serving(), lambda s: self._dialect.resume(s.connection.api))
        for server, error in failed.items():
            await self.supervisor.remove_from_service(server, str(error))
        self._publish_endpoints()

    async def plan_sync(self) -> SyncPlan:
        """Plan a weight sync to every running server. Waits until there is one."""
        await self.supervisor.await_running()
        wire = await self._planner.plan(self.supervisor.list_running())
        return SyncPlan(
            wire=wire,
            dtype=self._dtype,
            bucket_bytes=self._settings.bucket_bytes,
            adapter=wire.command.adapter,
            adapter_dtype="float32",  # servers merge in fp32, as the trainer does
        )

    async def receive(self, plan: SyncPlan, version: int) -> SyncResult:
        """Update every server of the plan, and restart those that fail. Raises `SyncError` if too few are left."""
        wire = plan.wire
        if not isinstance(wire, ServersWire):
            kind = kind_of(self._settings)
            raise SyncError(f"weight sync of version {version}: engine {kind!r} does not support {type(wire).__name__}")
        servers = [s for s in self.supervisor.all if wire.addresses.get(s.index) == s.connection.control]
        self.supervisor.has_synced = True
        for server in self.supervisor.list_running():  # servers outside the plan miss this version, too
            server.condition = Condition.WAITING
        self._publish_endpoints()
        results: dict[ManagedServer, SyncResult] = {}

        async def receive(server: ManagedServer) -> None:
            results[server] = await server.begin_update(wire.command_to(server.index), version).result()

        failed = await for_each(servers, receive)
        self._planner.record(results)
        if wire.command.folder:
            shutil.rmtree(wire.command.folder, ignore_errors=True)
        at_fault = [server for server, error in failed.items() if not isinstance(error, SyncAbortedError)]
        for server in at_fault or failed:  # servers aborted because of others wait for the next update
            await self.supervisor.remove_from_service(server, str(failed[server]))
        if not results:
            raise sync_failure(failed.values())
        first = next(iter(results.values()))
        for server, result in results.items():
            if (result.num_tensors, result.buckets) != (first.num_tensors, first.buckets):
                raise SyncError(
                    f"weight sync of version {version}: {server.name} received different bytes than the others"
                )
        for server in results:
            if server.condition is Condition.WAITING:
                server.condition = Condition.SERVING
        self.supervisor.check()
        self._publish_endpoints()
        return max(results.values(), key=lambda result: result.seconds)

    async def checksum(self) -> Mapping[str, int]:
        """Return checksums of all parameters, by the servers' own names. Raises `SyncError` if servers differ."""
        found: dict[str, Mapping[str, int]] = {}

        async def read(server: ManagedServer) -> None:
            found[server.name] = await server.connection.checksums(self._sync_s)

        for error in (await for_each(self.supervisor.list_serving(), read)).values():
            raise error
        first = next(iter(found.values()))
        for name, sums in found.items():
            if sums != first:
                tensor = next(key for key in first if sums.get(key) != first[key])
                raise SyncError(f"parameter {tensor!r} of {name} differs from that of {next(iter(found))}")
        return first

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Release GPU memory: the KV cache and, without ``keep_weights``, the weights, of which servers keep no
        copy."""
        parts = {"kv_cache"} if keep_weights else {"weights", "kv_cache"}
        await self._set_memory(parts - self._asleep, is_held=False)
        self._asleep |= parts

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Allocate GPU memory again; without ``kv_cache`` only for the weights."""
        parts = {"weights", "kv_cache"} if kv_cache else {"weights"}
        await self._set_memory(parts & self._asleep, is_held=True)
        self._asleep -= parts

    async def _set_memory(self, parts: set[str], *, is_held: bool) -> None:
        if parts and self._can_sleep:
            set_memory = self._dialect.set_memory
            await self.supervisor.call_running(lambda s: set_memory(self._api_of(s), parts, is_held=is_held))

    def _api_of(self, server: ManagedServer) -> HttpApi:
        """Return the server's API with a time limit as long as that of a weight sync."""
        return server.connection.api.with_time_limit(self._sync_s)

    async def health(self) -> None:
        """Raise `EngineError` if too few servers are left."""
        self.supervisor.check()

    async def metrics(self) -> Mapping[str, float]:
        """Return gauges of the responding servers, the number of serving servers and the number of restarts."""
        loads: dict[str, tuple[Load, ...]] = {}

        async def read_loads(server: ManagedServer) -> None:
            loads[server.name] = await server.connection.loads(timeout_s=self._settings.health_timeout_s)

        await for_each(
            self.supervisor.list_running(), read_loads
        )  # servers that do not respond are left to the supervisor
        return {
            **gauges(dict(sorted(loads.items())), self._speeds),
            "engine/serving": float(len(self.supervisor.list_serving())),
            "engine/restarts": float(sum(server.restarts for server in self.supervisor.all)),
        }

    async def close(self) -> None:
        """Stop the servers."""
        await self._client.disconnect()
        await self.supervisor.stop()
        if self._router is not None:
            await self._router.close()
        await self.supervisor.close()


def folder_of(context: BuildContext) -> Path:
    """Return the engine's folder in the run folder."""
    return context.run_dir.absolute() / f"{context.engine_name}s"


def start_limit_s(config: RunConfig) -> float:
    """Return the time limit for starting a server, including its actor."""
    return config.placement.start_timeout_s + ACTOR_S
