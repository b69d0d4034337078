"""Machines, processes and shared values: what a run needs of a cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
P = ParamSpec("P")


class Ref(Protocol[T_co]):
    """A value that lives somewhere in the cluster. Picklable; `get` works in every process of the run."""

    def get(self) -> T_co:
        """The value. Blocks; call it in a worker thread or a rank, not on an event loop."""
        ...


class Store(Protocol):
    """Shares values with every process of the run. Picklable: actors get it, too."""

    def put(self, value: T) -> Ref[T]:
        """Share a value; it is freed when the last reference is gone."""
        ...


class Actor(Protocol):
    """A process of the cluster that holds one object. Picklable: actors may call each other."""

    @property
    def name(self) -> str:
        """What messages and logs call it."""
        ...

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Run a method (async or not) and return its result, or raise what it raised, or `DeadlineError`."""
        ...

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """End the process; its object's ``close`` is called first where it has one."""
        ...


@overload
async def call(
    actor: Actor,
    timeout_s: float,
    method: Callable[Concatenate[Any, P], Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T: ...


@overload
async def call(
    actor: Actor, timeout_s: float, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
) -> T: ...


async def call(actor: Actor, timeout_s: float, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of the object that an actor holds, with its types: ``call(actor, 5.0, RolloutWorker.mark)``."""
    return await actor.call(method.__name__, *args, timeout_s=timeout_s, **kwargs)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Where one rank or worker process of a run goes."""

    node: int = 0
    """Index of the machine among those of the run."""
    gpu: int | None = None
    """Index of the GPU among those that the run has on that machine; None on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one actor needs."""

    bundles: tuple[Bundle, ...] = (Bundle(),)
    """All on one machine. An actor sees their GPUs and no others; actors that name one share it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, set before anything is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a run takes of one machine."""

    gpus: int = 0
    cpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a run."""

    address: str
    """IP by which the processes of the run reach it; the loopback where all of them are on it."""
    cores: int
    """CPU cores that a process on it may use."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that the run may use there, as in CUDA_VISIBLE_DEVICES."""
    agent: Actor | None = None
    """A `plasmid_runtime.cluster.node_agent.NodeAgent` there; None for the driver's own machine."""


class Cluster(Protocol):
    """Processes, placement and shared values; Ray implements it for runs, a local one for tests."""

    async def reserve(self, shares: Sequence[Share]) -> tuple[Node, ...]:
        """Take machines for the run, one for each share, and say which. Called once, before the first `start`.

        Raises `ConfigError` if they can never be had, `DeadlineError` if not in time.
        """
        ...

    async def start(
        self, factory: Any, /, *args: Any, name: str, resources: Resources, timeout_s: float = 120.0, **kwargs: Any
    ) -> Actor:
        """Start a process and make ``factory(*args, **kwargs)`` in it. The factory must be importable there."""
        ...

    @property
    def store(self) -> Store:
        """Where values are shared."""
        ...

    @property
    def num_gpus(self) -> int:
        """GPUs that the cluster has now; a cluster of others may grow."""
        ...

    async def close(self) -> None:
        """Stop every actor that is still running."""
        ...
