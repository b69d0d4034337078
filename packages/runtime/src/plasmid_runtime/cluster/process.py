"""A process of a run on Ray, its handle, and values that processes share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
import ray
from plasmid.errors import ActorDiedError, DeadlineError, PlasmidError, one_line
from plasmid.utils.log_files import last_lines, redirect_output
from plasmid.utils.safe_files import append_to
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from .actor_host import ActorHost, Outcome, unwrap_outcome
from .environment import forget_token

T = TypeVar("T")
log = logging.getLogger(__name__)
GET_S = 600.0
"""Longest time to fetch a shared value, from another machine at worst."""


@dataclass(frozen=True, slots=True)
class RayRef(Generic[T]):
    """A value in Ray's object store."""

    ref: Any

    def get(self) -> T:
        try:  # not by ray.get, which in the process of an actor warns that it blocks: this is called in threads
            value: T = self.ref.future().result(timeout=GET_S)
        except TimeoutError:
            raise DeadlineError(f"the object store did not give a value within {GET_S:g} s") from None
        except RayError as error:
            raise ActorDiedError(f"a value is lost with the process that made it: {one_line(error)}") from error
        return value


class RayStore:
    """Puts values into Ray's object store."""

    def put(self, value: T) -> RayRef[T]:
        return RayRef(ray.put(value))


class ActorProcess:
    """The Ray actor around a `ActorHost`."""

    def __init__(self, name: str, log_file: str, folder: str) -> None:
        forget_token()
        if Path(folder).is_dir():  # else Ray has chosen one, the copy of a job's folder where it has one
            os.chdir(folder)
        if Path(log_file).parent.is_dir():  # not so on a machine that does not share the run's folder, as will be said
            redirect_output(Path(log_file))
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"
        )
        self._host = ActorHost(name)

    async def make(self, factory: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        return await self._host.make(factory, args, kwargs)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        return await self._host.call(method, args, kwargs)

    async def close(self) -> Outcome:
        return await self._host.close()

    async def stacks(self) -> str:
        return await self._host.stacks()

    async def machine(self, address: str) -> Machine:
        interfaces = psutil.net_if_addrs().items()
        found = Machine(
            cores=len(os.sched_getaffinity(0)),
            gpus=tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ())),
            interface=next((name for name, found in interfaces if address in {one.address for one in found}), ""),
        )
        log.info("on %s with %d cores, GPUs for the run: %s", address, found.cores, ", ".join(found.gpus) or "none")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a process says of the machine that it is on."""

    cores: int
    gpus: tuple[str, ...]
    """Those that were given to the process."""
    interface: str
    """Name of the network interface that has the machine's address."""


@dataclass(frozen=True, slots=True)
class RayActor:
    """Handle of one process. Picklable: other processes may call it as well."""

    name: str
    handle: Any
    log_file: str

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        return await self.answer(self.handle.call.remote(method, args, kwargs), method, timeout_s)

    async def answer(self, ref: Any, what: str, timeout_s: float) -> Any:
        try:
            outcome = await asyncio.wait_for(await_ref(ref), timeout_s)
        except (TimeoutError, GetTimeoutError):
            await self._note_stacks(what)
            raise DeadlineError(
                f"{self.name}.{what}: no answer within {timeout_s:g} s; where it stands is in {self.log_file}"
            ) from None
        except RayActorError as error:
            words = last_lines(Path(self.log_file)) or one_line(error)
            raise ActorDiedError(f"{self.name} died during {what}: {words} (its log: {self.log_file})") from None
        except RayError as error:
            raise PlasmidError(f"{self.name}.{what}: {one_line(error)} (its log: {self.log_file})") from error
        return unwrap_outcome(outcome, self.name)

    async def _note_stacks(self, what: str) -> None:
        """Write the stacks of a silent process into its log. Gives up quickly: the deadline is the news."""
        with contextlib.suppress(RayError, TimeoutError, OSError):
            stacks = await asyncio.wait_for(await_ref(self.handle.stacks.remote()), 5)
            with append_to(Path(self.log_file)) as file:
                file.write(f"no answer to {what}; stacks:\n{stacks}\n")

    async def stop(self, *, grace_s: float = 10.0) -> None:
        try:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(await_ref(self.handle.close.remote()), grace_s)
        finally:
            ray.kill(self.handle)


async def await_ref(ref: Any) -> Any:
    return await ref
