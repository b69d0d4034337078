"""A cluster within one process, for tests and debugging: each actor is a thread with its own event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from plasmid.errors import ActorDiedError, DeadlineError
from plasmid.protocols import Actor, Node, ProcessState, Resources, Share
from plasmid.types.shared_groups import LocalStore
from plasmid.utils.addresses import LOOPBACK
from plasmid.utils.waiting import is_cancelling, serve_loop, wait_within

from .actor_host import ActorHost, unwrap_outcome
from .layout import check_gpus

T = TypeVar("T")
log = logging.getLogger(__name__)
INSPECT_S = 2.0
"""Maximum time for an actor's report, in seconds."""


class LocalActor:
    """An actor in a thread of this process, with the interface of a remote one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._host = ActorHost(name)
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        threading.Thread(target=serve_loop, args=(self._loop,), name=name, daemon=True).start()

    async def run(self, coroutine: Any, what: str, timeout_s: float) -> Any:
        """Run a coroutine of the host on the actor's loop."""
        if self._loop.is_closed():
            coroutine.close()
            raise ActorDiedError(f"{self.name} was stopped before {what}")
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        try:
            outcome = await wait_within(timeout_s, f"{self.name}.{what}", future, missing="answer")
            return unwrap_outcome(outcome, self.name)
        except asyncio.CancelledError:
            if not self._stopped or is_cancelling():
                raise
            raise ActorDiedError(f"{self.name} was stopped during {what}") from None

    async def make(self, factory: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> None:
        await self.run(self._host.make(factory, args, kwargs), "start", timeout_s)

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        return await self.run(self._host.call(method, args, kwargs), method, timeout_s)

    async def inspect(self) -> ProcessState:
        """Report what the actor is doing."""
        if self._loop.is_closed():
            return ProcessState(name=self.name, condition="ended")
        answer = asyncio.run_coroutine_threadsafe(self._host.report(), self._loop)
        try:
            report = await asyncio.wait_for(asyncio.wrap_future(answer), INSPECT_S)
        except TimeoutError:
            return ProcessState(name=self.name, condition="not responding")
        return ProcessState(name=self.name, position=report.position, stacks=report.text)

    async def stop(self, *, grace_s: float = 10.0) -> None:
        if not self._stopped:
            self._stopped = True
            try:
                await self.run(self._host.close(), "close", grace_s)
            except DeadlineError:
                log.warning("%s did not close within %g s; its thread keeps running", self.name, grace_s)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)


class LocalCluster:
    """Implements `protocols.Cluster` without processes and GPUs."""

    def __init__(self) -> None:
        self._actors: list[LocalActor] = []
        self._store = LocalStore()

    @property
    def store(self) -> LocalStore:
        return self._store

    @property
    def num_gpus(self) -> int:
        return 0

    async def reserve(self, shares: Sequence[Share]) -> tuple[Node, ...]:
        check_gpus(shares, 0)
        return (Node(address=LOOPBACK, cores=len(os.sched_getaffinity(0))),) * len(shares)

    async def start(
        self, factory: Any, /, *args: Any, name: str, resources: Resources, timeout_s: float = 120.0, **kwargs: Any
    ) -> Actor:
        actor = LocalActor(name)
        self._actors.append(actor)
        await actor.make(factory, args, kwargs, timeout_s)
        return actor

    async def inspect(self) -> tuple[ProcessState, ...]:
        return tuple(await asyncio.gather(*(actor.inspect() for actor in self._actors)))

    async def failure(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("a local cluster cannot fail")

    async def close(self) -> None:
        errors = await asyncio.gather(*(actor.stop() for actor in reversed(self._actors)), return_exceptions=True)
        self._actors.clear()
        for error in errors:
            if isinstance(error, BaseException):
                raise error
