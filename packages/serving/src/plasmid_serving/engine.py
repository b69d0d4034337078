"""Rollout engine over supervised servers of any `Dialect`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.errors import EngineError, SyncError
from plasmid.protocols import PauseMode, SyncPlan
from plasmid.types import SyncReceipt

from .api import HttpApi
from .client import ClientOptions, Endpoints, EndpointsFile, ServersClient
from .dialect import Dialect, Load
from .gauges import Speeds, gauges
from .planner import Planner
from .processes.router import Router
from .supervisor import Condition, ManagedServer, Supervisor, for_each
from .weights.errors import SyncAbortedError, sync_failure
from .weights.sender import ServersWire

if TYPE_CHECKING:
    from plasmid.components import BuildContext
    from plasmid.config.run import RunConfig

    from .settings import ServersConfig

ACTOR_S = 120.0
"""Time limit of the start of an actor itself."""
DRAIN_S = 0.2


class ServersEngine:
    """Implements `RolloutEngine` over servers that are supervised while they serve."""

    def __init__(
        self, servers: list[ManagedServer], settings: ServersConfig, context: BuildContext, dialect: Dialect
    ) -> None:
        """The servers run, and share one API key."""
        config, folder, key = context.config, folder_of(context), servers[0].connection.api.key
        self._settings, self._dialect = settings, dialect
        self._dtype = "auto" if settings.urls else settings.number_type(on_gpu=context.on_gpu)
        self._sync_s = config.run.sync_timeout_s
        self._can_sleep = config.placement.offload_engine and context.on_gpu and not settings.urls
        self._planner = Planner(settings, config, folder, on_gpu=context.on_gpu)
        self.endpoints = EndpointsFile(folder / "endpoints.json")
        self.supervisor = Supervisor(servers, settings, start_s=start_limit_s(config), changed=self._publish_endpoints)
        self._speeds = Speeds()
        self._paused = self._draining = False
        self._asleep: set[str] = set()
        self._error = ""
        options = ClientOptions(
            endpoints=self.endpoints, dialect=dialect, max_requests=settings.max_requests, api_key=key
        )
        self._client = ServersClient(options)
        self._router: Router | None = None
        if settings.router:
            log_file = context.run_dir.absolute() / "logs" / f"{context.engine_name}-router.log"
            self._router = Router(
                dialect, settings.host, key, folder=folder, log_file=log_file, changed=self._publish_endpoints
            )
        self._publish_endpoints()
        self.supervisor.begin()

    @property
    def client(self) -> ServersClient:
        """Client for rollout workers."""
        return self._client

    @property
    def pause_mode(self) -> PauseMode:
        """Mode of `pause` before a weight sync."""
        return self._settings.pause_mode

    def needs_weights(self) -> bool:
        """True if a restarted server only lacks the current weights. Raises `EngineError`."""
        self.supervisor.check()
        return any(s.condition is Condition.WAITING for s in self.supervisor.all)

    def _publish_endpoints(self) -> None:
        """Tell the rollout workers which servers to ask."""
        urls = tuple(s.connection.api.url for s in self.supervisor.serving())
        if self._router is not None:
            self._router.route_to(urls)
            urls = (self._router.url,) if self._router.url and urls else urls
        try:
            self.supervisor.check()
        except EngineError as error:
            self._error = str(error)
        self.endpoints.write(
            Endpoints(
                urls=urls,
                servers=tuple(s.connection.api.url for s in self.supervisor.running()),
                is_open=not self._draining,
                context_length=min((s.connection.info.context_length for s in self.supervisor.all), default=0),
                error=self._error,
            )
        )

    async def expect(self, session_ids: object) -> None:
        """Ignored: servers that repeat draws do so whatever the batch is."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens on every server. Servers that do not answer are given up."""
        if mode == "wait" and not self._paused:
            self._draining = True
            self._publish_endpoints()
            await self._drain()
        self._paused = True
        await self.supervisor.each_running(lambda s: self._dialect.pause(self._api_of(s), mode))

    async def _drain(self) -> None:
        """Wait until no server has a request, twice in a row because one may have been on its way."""
        idle = 0
        async with asyncio.timeout(self._sync_s):
            while idle < 2:
                await asyncio.sleep(DRAIN_S)
                loads: list[Load] = []

                async def look(server: ManagedServer, into: list[Load] = loads) -> None:
                    into += await server.connection.loads(timeout_s=self._settings.health_timeout_s)

                await self.supervisor.each_running(look)
                idle = 0 if any(load.running or load.queued for load in loads) else idle + 1

    async def resume(self) -> None:
        """Undo `pause` on the servers that hold a proved version. Raises `SyncError` if none does."""
        if not self.supervisor.serving():
            self.supervisor.check()
            raise SyncError("the engine cannot resume: no server holds a complete version")
        self._paused = self._draining = False
        failed = await for_each(self.supervisor.serving(), lambda s: self._dialect.resume(s.connection.api))
        for server, error in failed.items():
            await self.supervisor.give_up(server, str(error))
        self._publish_endpoints()

    async def plan_sync(self) -> SyncPlan:
        """Plan a weight sync to every running server. Waits until there is one."""
        await self.supervisor.await_running()
        wire = await self._planner.plan(self.supervisor.running())
        return SyncPlan(wire=wire, dtype=self._dtype, bucket_bytes=self._settings.bucket_bytes)

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Update every server of the plan. Gives up those that fail; raises `SyncError` if too few are left."""
        wire = plan.wire
        if not isinstance(wire, ServersWire):
            kind = type(self._settings).model_fields["kind"].default
            raise SyncError(
                f"weight sync of version {version}: engine {kind!r} cannot receive by {type(wire).__name__}"
            )
        servers = [s for s in self.supervisor.all if wire.addresses.get(s.index) == s.connection.control]
        self.supervisor.has_synced = True
        for server in self.supervisor.running():  # servers that the plan leaves out miss this version, too
            server.condition = Condition.WAITING
        self._publish_endpoints()
        receipts: dict[ManagedServer, SyncReceipt] = {}

        async def receive(server: ManagedServer) -> None:
            receipts[server] = await server.begin_update(wire.command_to(server.index), version).result()

        failed = await for_each(servers, receive)
        if wire.command.folder:
            shutil.rmtree(wire.command.folder, ignore_errors=True)
        at_fault = [server for server, error in failed.items() if not isinstance(error, SyncAbortedError)]
        for server in at_fault or failed:  # servers that others have aborted wait for the next update
            await self.supervisor.give_up(server, str(failed[server]))
        if not receipts:
            raise sync_failure(failed.values())
        first = next(iter(receipts.values()))
        for server, receipt in receipts.items():
            if (receipt.num_tensors, receipt.buckets) != (first.num_tensors, first.buckets):
                raise SyncError(f"weight sync of version {version}: {server.name} received other bytes than the others")
        for server in receipts:
            if server.condition is Condition.WAITING:
                server.condition = Condition.SERVING
        self.supervisor.check()
        self._publish_endpoints()
        return max(receipts.values(), key=lambda receipt: receipt.seconds)

    async def checksum(self) -> Mapping[str, int]:
        """Checksums of every parameter, by the servers' own names. Raises `SyncError` if servers differ."""
        found: dict[str, Mapping[str, int]] = {}

        async def ask(server: ManagedServer) -> None:
            found[server.name] = await server.connection.checksums(self._sync_s)

        for error in (await for_each(self.supervisor.serving(), ask)).values():
            raise error
        first = next(iter(found.values()))
        for name, sums in found.items():
            if sums != first:
                tensor = next(key for key in first if sums.get(key) != first[key])
                raise SyncError(f"parameter {tensor!r} of {name} differs from that of {next(iter(found))}")
        return first

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Release GPU memory: the KV cache and, without ``keep_weights``, the weights. Servers keep no copy of them."""
        parts = {"kv_cache"} if keep_weights else {"weights", "kv_cache"}
        await self._set_memory(parts - self._asleep, is_held=False)
        self._asleep |= parts

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Take GPU memory again, without ``kv_cache`` for the weights only."""
        parts = {"weights", "kv_cache"} if kv_cache else {"weights"}
        await self._set_memory(parts & self._asleep, is_held=True)
        self._asleep -= parts

    async def _set_memory(self, parts: set[str], *, is_held: bool) -> None:
        if parts and self._can_sleep:
            set_memory = self._dialect.set_memory
            await self.supervisor.each_running(lambda s: set_memory(self._api_of(s), parts, is_held=is_held))

    def _api_of(self, server: ManagedServer) -> HttpApi:
        """Calls to a server that may take as long as a weight sync."""
        return server.connection.api.limited(self._sync_s)

    async def health(self) -> None:
        """Raises `EngineError` when too few servers are left."""
        self.supervisor.check()

    async def metrics(self) -> Mapping[str, float]:
        """Gauges of the servers that answer; how many serve, and how many restarts there were."""
        loads: dict[str, tuple[Load, ...]] = {}

        async def look(server: ManagedServer) -> None:
            loads[server.name] = await server.connection.loads(timeout_s=self._settings.health_timeout_s)

        await for_each(self.supervisor.running(), look)  # those that do not answer are left to the supervisor
        return {
            **gauges(dict(sorted(loads.items())), self._speeds),
            "engine/serving": float(len(self.supervisor.serving())),
            "engine/restarts": float(sum(server.restarts for server in self.supervisor.all)),
        }

    async def close(self) -> None:
        """Stop the servers."""
        await self._client.close()
        await self.supervisor.stop()
        if self._router is not None:
            await self._router.close()
        await self.supervisor.close()


def folder_of(context: BuildContext) -> Path:
    """Return the engine's folder in the run folder."""
    return context.run_dir.absolute() / f"{context.engine_name}s"


def start_limit_s(config: RunConfig) -> float:
    """Return the time limit of the start of a server, its actor included."""
    return config.placement.start_timeout_s + ACTOR_S
