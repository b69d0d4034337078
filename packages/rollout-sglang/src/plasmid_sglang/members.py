"""The servers of one engine: which serve, which wait for weights, which are being started, which are gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from plasmid.errors import EngineError, PlasmidError, SyncError, one_line
from plasmid.protocols import Actor

from .actor import Started
from .api import Abilities, Api
from .control import ControlAddress, ControlClient
from .receiving import Commands, Update
from .transport import Transport
from .wire import Order

log = logging.getLogger(__name__)
STOP_S = 15.0
LOOK_S = 0.2


class Condition(StrEnum):
    """What a server is doing."""

    SERVING = "serving"
    WAITING = "waiting"
    """It runs, and must get a complete set of weights before it may serve."""
    STARTING = "starting"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Member:
    """One server."""

    index: int
    name: str
    actor: Actor
    start: Callable[[], Awaitable[Actor]]
    """Makes a new actor, if the old one died with its machine or was killed."""
    api: Api
    commands: Commands
    condition: Condition = Condition.SERVING
    restarts: int = 0
    misses: int = 0
    """Looks in a row that it has failed."""
    update: Update | None = None
    """The last one."""
    pulse: int | None = None
    """Of the update, when it was last looked at."""
    error: str = ""
    """Why it was last given up."""

    @property
    def runs(self) -> bool:
        """True if there is a server to talk to."""
        return self.condition in (Condition.SERVING, Condition.WAITING)

    @property
    def abilities(self) -> Abilities:
        """What the server knows."""
        return self.commands.abilities

    @property
    def control(self) -> ControlAddress:
        """Its control channel."""
        return self.commands.control.address

    def take_up(self, started: Started) -> None:
        """Talk to the server that was started in place of the last one."""
        self.api = Api(started.url, self.api.key)
        self.commands = type(self.commands)(self.api, started.abilities, ControlClient(started.control))

    def begin_update(self, order: Order, transport: Transport, version: int) -> Update:
        """Take over what the trainer sends; an earlier update that is not complete is over."""
        if self.update is not None:
            self.update.end(SyncError("it was replaced by a later one"))
        self.update = Update(self.commands, order, transport, version)
        return self.update


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How servers are looked after."""

    interval_s: float
    timeout_s: float
    failures: int
    max_restarts: int
    min_engines: int
    start_s: float


class Members:
    """All servers. ``changed`` is called whenever one begins or ends to serve."""

    def __init__(self, members: Sequence[Member], watch: Watch, changed: Callable[[], None]) -> None:
        self.all = tuple(members)
        self._watch, self._changed = watch, changed
        self._tasks: set[asyncio.Task[None]] = set()
        self.has_synced = False
        """Before the first weight sync, what a server loads from the model's folder is the policy."""

    def begin_watching(self) -> None:
        """Look at every server from now on."""
        for member in self.all:
            self._keep(self._look_after(member))

    def _keep(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def serving(self) -> tuple[Member, ...]:
        """Those that hold a proved version."""
        return tuple(m for m in self.all if m.condition is Condition.SERVING)

    def running(self) -> tuple[Member, ...]:
        """Those that can take weights."""
        return tuple(m for m in self.all if m.runs)

    async def some_running(self) -> None:
        """Wait until one can take weights. Raises `EngineError` when too few are left."""
        self.check()
        if not self.running():
            log.warning("no server runs; waiting for one of those that are being started")
        while not self.running():
            await asyncio.sleep(LOOK_S)
            self.check()

    def check(self) -> None:
        """Raises `EngineError` when too few are left to go on."""
        left = [m for m in self.all if m.condition is not Condition.GONE]
        if len(left) < self._watch.min_engines:
            errors = "; ".join(f"{m.name}: {m.error}" for m in self.all if m.condition is Condition.GONE)
            raise EngineError(
                f"{len(left)} of {len(self.all)} servers are left, "
                f"rollout.min_engines is {self._watch.min_engines}; {errors}"
            )

    async def _look_after(self, member: Member) -> None:
        while member.condition is not Condition.GONE:
            await asyncio.sleep(self._watch.interval_s)
            if not member.runs:
                continue
            try:
                await self._look(member)
                member.misses = 0
            except PlasmidError as error:
                member.misses += 1
                log.warning("%s: look %d of %d failed: %s", member.name, member.misses, self._watch.failures, error)
                if member.misses >= self._watch.failures or isinstance(error, _Ended):
                    await self.give_up(member, one_line(error))

    async def _look(self, member: Member) -> None:
        """Raises `PlasmidError` if the server does not answer; at once if its process or actor has ended."""
        timeout_s = self._watch.timeout_s
        try:
            code = await member.actor.call("exit_code", timeout_s=timeout_s)
        except PlasmidError as error:
            raise _Ended(f"its actor is gone: {error}") from None
        if code is not None:
            raise _Ended(f"its server ended with code {code}")
        before = member.pulse
        member.pulse = None if member.update is None else await member.update.pulse()
        if member.pulse is not None and member.pulse != before:
            return  # it takes weights over, and would answer after the last
        await member.api.loads(timeout_s=timeout_s)

    async def give_up(self, member: Member, error: str) -> None:
        """Take a server out, and start it anew if it may be."""
        if not member.runs:
            return
        member.condition, member.error = Condition.STARTING, error
        self._changed()
        log.warning("%s: given up: %s", member.name, error)
        self._keep(self._restart(member))

    async def _restart(self, member: Member) -> None:
        while member.restarts < self._watch.max_restarts:
            member.restarts += 1
            try:
                await self._start(member)
            except PlasmidError as error:
                member.error = one_line(error)
                log.warning("%s: restart %d failed: %s", member.name, member.restarts, error)
                continue
            log.warning("%s: runs again after %d restarts", member.name, member.restarts)
            member.misses = 0
            member.condition = Condition.WAITING if self.has_synced else Condition.SERVING
            self._changed()
            return
        member.condition = Condition.GONE
        self._changed()

    async def _start(self, member: Member) -> None:
        await member.api.close()
        try:
            await member.actor.call("kill", timeout_s=STOP_S)
        except PlasmidError:
            await member.actor.stop(grace_s=0.1)
            member.actor = await member.start()
        started: Started = await member.actor.call("start", timeout_s=self._watch.start_s)
        member.take_up(started)

    async def stop_watching(self) -> None:
        """Look no more, and start nothing."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop the servers."""
        for member in self.all:
            if member.update is not None:
                member.update.end(EngineError("the engine was closed"))
        await asyncio.gather(*(member.api.close() for member in self.all))
        await asyncio.gather(*(member.actor.stop() for member in self.all))


class _Ended(EngineError):
    """There is nothing to wait for."""


async def each(members: Iterable[Member], what: Callable[[Member], Awaitable[None]]) -> dict[Member, PlasmidError]:
    """Do something with all of them at once; what those that failed have raised."""
    members = list(members)
    results = await asyncio.gather(*(what(member) for member in members), return_exceptions=True)
    failed = {}
    for member, result in zip(members, results, strict=True):
        if isinstance(result, PlasmidError):
            failed[member] = result
        elif isinstance(result, BaseException):
            raise result
    return failed
