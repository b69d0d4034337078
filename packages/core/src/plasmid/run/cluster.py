"""The cluster on Ray: the only file that imports it. Owns processes, placement and shared values."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from ..errors import ActorDiedError, DeadlineError, PlasmidError, one_line
from ..protocols import Actor, Resources
from .host import Host, Outcome, last_lines, redirect_output, unwrap

T = TypeVar("T")
log = logging.getLogger(__name__)
GET_S = 600.0
"""Longest time to fetch a shared value, from another machine at worst."""


@dataclass(frozen=True, slots=True)
class RayRef(Generic[T]):
    """A value in Ray's object store."""

    ref: Any

    def get(self) -> T:
        try:
            value: T = ray.get(self.ref, timeout=GET_S)
        except GetTimeoutError:
            raise DeadlineError(f"the object store did not give a value within {GET_S:g} s") from None
        except RayError as error:
            raise ActorDiedError(f"a value is lost with the process that made it: {one_line(error)}") from error
        return value


class RayStore:
    """Puts values into Ray's object store."""

    def put(self, value: T) -> RayRef[T]:
        return RayRef(ray.put(value))


class _Process:
    """The Ray actor around a `Host`."""

    def __init__(self, name: str, log_file: str, folder: str) -> None:
        os.chdir(folder)
        redirect_output(Path(log_file))
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"
        )
        self._host = Host(name)

    async def make(self, factory: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        return await self._host.make(factory, args, kwargs)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        return await self._host.call(method, args, kwargs)

    async def close(self) -> Outcome:
        return await self._host.close()

    async def stacks(self) -> str:
        return await self._host.stacks()


@dataclass(frozen=True, slots=True)
class RayActor:
    """Handle of one process. Picklable: other processes may call it as well."""

    name: str
    handle: Any
    log_file: str

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        return await self._answer(self.handle.call.remote(method, args, kwargs), method, timeout_s)

    async def _answer(self, ref: Any, what: str, timeout_s: float) -> Any:
        try:
            outcome = await asyncio.wait_for(_result(ref), timeout_s)
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
        return unwrap(outcome, self.name)

    async def _note_stacks(self, what: str) -> None:
        """Write the stacks of a silent process into its log. Gives up quickly: the deadline is the news."""
        with contextlib.suppress(RayError, TimeoutError, OSError):
            stacks = await asyncio.wait_for(_result(self.handle.stacks.remote()), 5)
            with Path(self.log_file).open("a") as file:
                file.write(f"no answer to {what}; stacks:\n{stacks}\n")

    async def stop(self, *, grace_s: float = 10.0) -> None:
        try:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(_result(self.handle.close.remote()), grace_s)
        finally:
            ray.kill(self.handle)


async def _result(ref: Any) -> Any:
    return await ref


class RayCluster:
    """Implements `protocols.Cluster`. Starts a local Ray unless this process is connected to one already."""

    def __init__(self, *, log_dir: Path) -> None:
        self._log_dir = log_dir.absolute()
        self._actors: list[RayActor] = []
        self._started = not ray.is_initialized()
        if self._started:
            _start_ray()
        self._gpus = _num_gpus()

    @property
    def store(self) -> RayStore:
        return RayStore()

    @property
    def num_gpus(self) -> int:
        return self._gpus

    async def start(
        self, factory: Any, /, *args: Any, name: str, resources: Resources, timeout_s: float = 120.0, **kwargs: Any
    ) -> Actor:
        env = {
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "MALLOC_ARENA_MAX": "2",
            "NCCL_CUMEM_ENABLE": "0",  # a broadcast to SGLang fails unless all members agree, and SGLang sets this
        }
        env |= resources.env
        bundles = (resources.gpu,) if isinstance(resources.gpu, int) else resources.gpu or ()
        env["CUDA_VISIBLE_DEVICES"] = ",".join(_visible_gpus()[bundle] for bundle in bundles)
        log_file = str(self._log_dir / f"{name}.log")
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "max_concurrency": 4096}
        process: Any = ray.remote(_Process)
        handle = process.options(**options, runtime_env={"env_vars": env}).remote(name, log_file, str(Path.cwd()))
        actor = RayActor(name=name, handle=handle, log_file=log_file)
        self._actors.append(actor)
        await actor._answer(handle.make.remote(factory, args, kwargs), "start", timeout_s)
        return actor

    async def close(self) -> None:
        try:
            await asyncio.gather(*(actor.stop() for actor in reversed(self._actors)))
        finally:  # also when somebody is in a hurry: a second Ctrl-C ends the waiting, not the cleaning up
            self._actors.clear()
            if self._started:
                ray.shutdown()


def _num_gpus() -> int:
    return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]


def _start_ray() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine's loopback
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    in_main = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            num_cpus=1,  # actors ask for none: on a laptop parts take turns on the cores
            include_dashboard=False,
            object_store_memory=_object_store_bytes(),
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (RayError, RuntimeError, OSError, ValueError) as error:
        raise PlasmidError(f"ray did not start: {one_line(error)}") from error
    finally:
        if in_main:  # Ray installs a handler that leaves at once
            signal.signal(signal.SIGTERM, on_sigterm)


def _object_store_bytes() -> int:
    """A fortieth of the memory, between 256 MiB and 8 GiB: rows of tokens are small, weights travel in buckets.

    The store never gives pages back that it has touched once, so a large one costs what a run could use.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(256 << 20, min(total // 40, 8 << 30))


def _visible_gpus() -> list[str]:
    """Physical names of the GPUs that this process may use, by bundle index (one node)."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(i) for i in range(_num_gpus())]
