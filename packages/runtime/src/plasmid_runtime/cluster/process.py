"""Processes of a run as Ray actors, their handles, and shared values."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
import ray
from plasmid.errors import ActorDiedError, ClusterError, DeadlineError, one_line
from plasmid.utils.log_files import read_exit_cause, redirect_output
from plasmid.utils.waiting import wait_within
from plasmid.utils.waits.ledger import LEDGER
from ray.exceptions import RayActorError, RayError

from .actor_host import ActorHost, ActorReport, Outcome, unwrap_outcome
from .opening import forget_token
from .watch.inspection import LocalReports

T = TypeVar("T")
log = logging.getLogger(__name__)
UNEXPECTED = "died unexpectedly"
"""Part of Ray's message about a process that Ray did not end."""
KILLED = "its log is empty; it was killed from outside, perhaps because memory ran out (see `dmesg`)"
EXIT_S = 3.0
"""Time limit for each step of ending a process after the cluster has lost its control process, in seconds."""
GET_S = 600.0
"""Maximum time to fetch a shared value, possibly from another machine, in seconds."""


@dataclass(frozen=True, slots=True)
class RayRef(Generic[T]):
    """A value in Ray's object store."""

    ref: Any

    def get(self) -> T:
        try:  # ray.get would warn about blocking in an actor, although this is only called in threads
            value: T = self.ref.future().result(timeout=GET_S)
        except TimeoutError:
            raise DeadlineError(f"the object store did not return a value within {GET_S:g} s") from None
        except RayError as error:
            raise ActorDiedError(f"a value was lost with the process that created it: {one_line(error)}") from error
        return value


class RayStore:
    """Puts values into Ray's object store."""

    def put(self, value: T) -> RayRef[T]:
        return RayRef(ray.put(value))


class ActorProcess:
    """Ray actor that runs an `ActorHost`."""

    def __init__(self, name: str, log_file: str, folder: str) -> None:
        forget_token()
        if Path(folder).is_dir():  # otherwise stay in the folder that Ray chose, such as the copy of a job's folder
            os.chdir(folder)
        log_path = Path(log_file)
        if log_path.parent.is_dir():  # missing on machines that do not share the run folder; node checks report these
            redirect_output(log_path)
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"
        )
        self._host = ActorHost(name)
        LEDGER.report_always(LocalReports(log_path.parent.parent, name).write)

    async def identify(self) -> ProcessId:
        """Return the process id and machine. Responds immediately, before any code that may hang."""
        return ProcessId(pid=os.getpid(), node=ray.get_runtime_context().get_node_id())

    async def make(self, factory: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        made = await self._host.make(factory, args, kwargs)
        gc.freeze()  # ranks collect garbage at each offload, which visits every imported module that is not frozen
        return made

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        return await self._host.call(method, args, kwargs)

    async def close(self) -> Outcome:
        return await self._host.close(wait=False)  # the caller ends the process next

    async def exit(self) -> None:
        """End this process, without Ray's control process."""
        os._exit(0)

    async def report(self) -> ActorReport:
        return await self._host.report()

    async def machine(self, address: str) -> Machine:
        interfaces = psutil.net_if_addrs().items()
        found = Machine(
            cores=len(os.sched_getaffinity(0)),
            gpus=tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ())),
            interface=next((name for name, found in interfaces if address in {one.address for one in found}), ""),
        )
        log.info("%s: %d cores, GPUs for the run: %s", address, found.cores, ", ".join(found.gpus) or "none")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process of the cluster."""

    pid: int
    node: str
    """Ray's id of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine of a process, as the process sees it."""

    cores: int
    gpus: tuple[str, ...]
    """GPUs assigned to the process."""
    interface: str
    """Network interface with the machine's address."""


@dataclass(frozen=True, slots=True)
class RayActor:
    """Handle of a process. Picklable, so that other processes can call it."""

    name: str
    handle: Any
    log_file: str

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        return await self.answer(self.handle.call.remote(method, args, kwargs), method, timeout_s)

    async def answer(self, ref: Any, what: str, timeout_s: float) -> Any:
        try:
            outcome = await wait_within(timeout_s, f"{self.name}.{what}", await_ref(ref), missing="answer")
        except RayActorError as error:
            words = read_exit_cause(Path(self.log_file)) or (KILLED if UNEXPECTED in str(error) else one_line(error))
            raise ActorDiedError(f"{self.name} died during {what}: {words} (its log: {self.log_file})") from None
        except RayError as error:
            raise ClusterError(f"{self.name}.{what}: {one_line(error)} (its log: {self.log_file})") from error
        return unwrap_outcome(outcome, self.name)

    async def stop(self, *, grace_s: float = 10.0) -> None:
        try:
            await self._await_quietly(self.handle.close.remote(), grace_s)
        finally:
            ray.kill(self.handle)

    async def exit(self) -> None:
        """Stop the process without the cluster's control process, for clusters that have lost theirs."""
        await self._await_quietly(self.handle.close.remote(), EXIT_S)
        await self._await_quietly(self.handle.exit.remote(), EXIT_S)

    async def _await_quietly(self, ref: Any, limit_s: float) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(await_ref(ref), limit_s)


async def await_ref(ref: Any) -> Any:
    return await ref
