"""The engine as the loop sees it: servers behind one handle."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plasmid.errors import EngineError, SyncError
from plasmid.protocols import PauseMode, SyncPlan
from plasmid.types import SyncReceipt

from .bulletin import Bulletin, BulletinFile
from .client import ClientOptions, SGLangClient
from .gauges import Load, Speeds, busy, gauges
from .lost import CutOffError, lost
from .members import Condition, Member, Members, Watch, each
from .planning import Planner
from .router import Router
from .settings import SGLang
from .wire import SGLangWire

log = logging.getLogger(__name__)
DRAIN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the engine is put together from."""

    settings: SGLang
    dtype: str
    sync_s: float
    """Longest time for one weight sync."""
    can_sleep: bool
    """Servers give their GPU memory up when told."""
    watch: Watch
    folder: Path
    """Of the run's files that are the engine's."""
    log_file: Path
    """Of the router."""
    api_key: str = field(default="", repr=False)
    """That the servers ask for, and the router, which every run starts with a random one; empty for `urls`."""


class SGLangEngine:
    """Implements `RolloutEngine` over servers that are looked after while they serve."""

    def __init__(self, members: list[Member], planner: Planner, bulletin: BulletinFile, options: EngineOptions) -> None:
        self._options = options
        self._planner, self._bulletin = planner, bulletin
        self.members = Members(members, options.watch, self._announce)
        self._speeds = Speeds()
        self._paused = False
        self._draining = False
        self._asleep: set[str] = set()
        self._error = ""
        settings = options.settings
        self._client = SGLangClient(
            bulletin,
            ClientOptions(
                max_requests=settings.max_requests,
                seeded=settings.deterministic or settings.true_on_policy,
                has_spans=settings.pause_mode == "in_place",
                keep_session=settings.router,
                api_key=options.api_key,
            ),
        )
        self._router: Router | None = None
        if settings.router:
            self._router = Router(
                settings.router_args,
                host=settings.host,
                api_key=options.api_key,
                folder=options.folder,
                log_file=options.log_file,
                changed=self._announce,
            )
            self._router.begin()
        self._announce()
        self.members.begin_watching()

    @property
    def client(self) -> SGLangClient:
        """What rollout workers talk to."""
        return self._client

    @property
    def pause_mode(self) -> PauseMode:
        """What the loop asks of `pause` before a weight sync."""
        return self._options.settings.pause_mode

    def needs_weights(self) -> bool:
        """True if a server that was started anew could serve, if it had the current weights. Raises `EngineError`."""
        self.members.check()
        return any(m.condition is Condition.WAITING for m in self.members.all)

    def _announce(self) -> None:
        """Tell the workers which servers they may ask."""
        urls = tuple(m.api.url for m in self.members.serving())
        if self._router is not None:
            self._router.route_to(urls)
            urls = (self._router.url,) if self._router.url and urls else urls
        try:
            self.members.check()
        except EngineError as error:
            self._error = str(error)
        self._bulletin.write(
            Bulletin(
                urls=urls,
                servers=tuple(m.api.url for m in self.members.running()),
                is_open=not self._draining,
                context_length=min((m.abilities.context_length for m in self.members.all), default=0),
                error=self._error,
            )
        )

    async def expect(self, session_ids: object) -> None:
        """Of no use here: SGLang repeats draws in its deterministic mode only, where no batch can change a result."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens on every server. One that does not answer is given up."""
        if mode == "wait" and not self._paused:
            self._draining = True
            self._announce()
            await self._drain()
        self._paused = True
        how = "abort"
        if mode == "in_place":
            how = "retract" if self._options.settings.recompute_kv else "in_place"

        async def pause(member: Member) -> None:
            await member.api.pause(how, timeout_s=self._options.sync_s)

        await self._each_running(pause)

    async def _drain(self) -> None:
        """Wait until no server has a request, twice in a row: one may have been on its way."""
        quiet = 0
        async with asyncio.timeout(self._options.sync_s):
            while quiet < 2:
                await asyncio.sleep(DRAIN_S)
                loads: list[Load] = []

                async def look(member: Member, into: list[Load] = loads) -> None:
                    into += await member.api.loads(timeout_s=self._options.watch.timeout_s)

                await self._each_running(look)
                quiet = 0 if busy(loads) else quiet + 1

    async def resume(self) -> None:
        """Undo `pause` on the servers that hold a proved version. Raises `SyncError` if none does."""
        if not self.members.serving():
            self.members.check()
            raise SyncError("the engine cannot resume: no server holds a complete version")
        self._paused = self._draining = False

        async def resume(member: Member) -> None:
            await member.api.resume()

        failed = await each(self.members.serving(), resume)
        for member, error in failed.items():
            await self.members.give_up(member, str(error))
        self._announce()

    async def plan_sync(self) -> SyncPlan:
        """A plan for one weight sync to every server that runs, or to the first that does."""
        settings = self._options.settings
        await self.members.some_running()
        wire = await self._planner.plan(self.members.running())
        return SyncPlan(wire=wire, dtype=self._options.dtype, bucket_bytes=settings.bucket_bytes)

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Update every server of the plan. One that fails is out; `SyncError` if that leaves too few."""
        wire = plan.wire
        if not isinstance(wire, SGLangWire):
            raise SyncError(
                f"weight sync of version {version}: engine 'sglang' cannot receive by {type(wire).__name__}"
            )
        order = wire.order
        members = [m for m in self.members.all if wire.addresses.get(m.index) == m.control]
        self.members.has_synced = True
        for member in self.members.running():  # also those that the plan had to leave out: they miss this version
            member.condition = Condition.WAITING
        self._announce()
        receipts: dict[Member, SyncReceipt] = {}

        async def receive(member: Member) -> None:
            receipts[member] = await member.begin_update(order, wire.transport(member.index), version).result()

        failed = await each(members, receive)
        if order.folder is not None:
            shutil.rmtree(order.folder, ignore_errors=True)
        at_fault = [member for member, error in failed.items() if not isinstance(error, CutOffError)]
        for member in at_fault or failed:  # those that others have cut off wait for the next update
            await self.members.give_up(member, str(failed[member]))
        if not receipts:
            raise lost(failed.values())
        first = next(iter(receipts.values()))
        for member, receipt in receipts.items():
            if (receipt.num_tensors, receipt.buckets) != (first.num_tensors, first.buckets):
                raise SyncError(f"weight sync of version {version}: {member.name} received other bytes than the others")
        for member in receipts:
            if member.condition is Condition.WAITING:
                member.condition = Condition.SERVING
        self.members.check()
        self._announce()
        return max(receipts.values(), key=lambda receipt: receipt.seconds)

    async def checksum(self) -> Mapping[str, int]:
        """Of every parameter, by the servers' own names of them. Raises `SyncError` if servers differ."""
        found: dict[str, Mapping[str, int]] = {}

        async def ask(member: Member) -> None:
            limit_s = self._options.sync_s
            found[member.name] = await member.commands.checksums(limit_s)

        failed = await each(self.members.serving(), ask)
        for error in failed.values():
            raise error
        first = next(iter(found.values()))
        for name, sums in found.items():
            if sums != first:
                tensor = next(key for key in first if sums.get(key) != first[key])
                raise SyncError(f"parameter {tensor!r} of {name} differs from that of {next(iter(found))}")
        return first

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Give up GPU memory: the KV cache, and without ``keep_weights`` the weights, of which SGLang has no copy."""
        tags = {"kv_cache"} if keep_weights else {"weights", "kv_cache"}
        await self._memory("/release_memory_occupation", tags - self._asleep)
        self._asleep |= tags

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Take GPU memory again; without ``kv_cache`` for the weights only."""
        wanted = {"weights", "kv_cache"} if kv_cache else {"weights"}
        await self._memory("/resume_memory_occupation", wanted & self._asleep)
        self._asleep -= wanted

    async def _memory(self, path: str, tags: set[str]) -> None:
        if not self._options.can_sleep or not tags:
            return

        async def tell(member: Member) -> None:
            await member.api.post(path, {"tags": sorted(tags)}, timeout_s=self._options.sync_s)

        await self._each_running(tell)

    async def _each_running(self, what: object) -> None:
        failed = await each(self.members.running(), what)  # type: ignore[arg-type]
        for member, error in failed.items():
            await self.members.give_up(member, str(error))

    async def health(self) -> None:
        """Raises `EngineError` when too few servers are left."""
        self.members.check()

    async def metrics(self) -> Mapping[str, float]:
        """What the servers say that answer; how many serve, and how often one was started anew."""
        loads: dict[str, tuple[Load, ...]] = {}

        async def look(member: Member) -> None:
            loads[member.name] = await member.api.loads(timeout_s=self._options.watch.timeout_s)

        await each(self.members.running(), look)  # those that do not answer are somebody else's business
        restarts = sum(member.restarts for member in self.members.all)
        return {
            **gauges(dict(sorted(loads.items())), self._speeds),
            "engine/serving": float(len(self.members.serving())),
            "engine/restarts": float(restarts),
        }

    async def close(self) -> None:
        """Stop the servers."""
        await self._client.close()
        await self.members.stop_watching()
        if self._router is not None:
            await self._router.close()
        await self.members.close()
