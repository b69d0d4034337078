"""Interface of a cluster: machines, processes and shared values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
P = ParamSpec("P")


class Ref(Protocol[T_co]):
    """Reference to a value in the cluster. Picklable; `get` works in every process of the run."""

    def get(self) -> T_co:
        """Fetch the value. Blocks, so call it in a thread or on a rank, not on an event loop."""


class Store(Protocol):
    """Shares values with all processes of the run. Picklable, so that actors can use it."""

    def put(self, value: T) -> Ref[T]:
        """Share a value. It is freed with its last reference."""


class Actor(Protocol):
    """Handle of a process in the cluster that hosts one object. Picklable, so actors can call each other."""

    @property
    def name(self) -> str:
        """Name in messages and logs."""

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Call a sync or async method of the object and return its result. Raises its errors, or `DeadlineError`."""

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """Call the object's ``close``, if it has one, and end the process."""


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
    """Call a method of an actor's object with static types: ``call(actor, 5.0, RolloutWorker.mark)``."""
    return await actor.call(method.__name__, *args, timeout_s=timeout_s, **kwargs)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Placement of one rank or worker process."""

    node: int = 0
    """Index of the machine among the run's machines."""
    gpu: int | None = None
    """Index of the GPU among the run's GPUs on that machine; None on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of one actor."""

    bundles: tuple[Bundle, ...] = (Bundle(),)
    """Bundles on one machine. The actor sees only their GPUs; actors with the same bundle share its GPU."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, set before any import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Resources that a run reserves on one machine."""

    gpus: int = 0
    cpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a run."""

    address: str
    """IP address for the other processes of the run; the loopback address if the run has one machine."""
    cores: int
    """Number of CPU cores that a process may use."""
    gpus: tuple[str, ...] = ()
    """The run's GPUs on the machine, as in CUDA_VISIBLE_DEVICES."""
    agent: Actor | None = None
    """The machine's `plasmid_runtime.cluster.node_agent.NodeAgent`; None for the driver's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """Current activity of one process of a run."""

    name: str
    pid: int | None = None
    """Process id; None for an actor that is not a process or does not respond."""
    condition: str = ""
    """Problem of the process, such as ``stopped by a signal``; empty if there is none."""
    position: str = ""
    """Running call and its current position in the code; empty if the process waits for calls."""
    stacks: str = ""
    """Waits, tasks and stacks of threads, as far as available."""


class Cluster(Protocol):
    """Processes, placement and shared values. Implemented by Ray for runs, and by a local cluster for tests."""

    async def reserve(self, shares: Sequence[Share]) -> tuple[Node, ...]:
        """Reserve one machine for each share, and return them. Called once, before the first `start`.

        Raises `ConfigError` if the cluster cannot provide them, and `DeadlineError` if it does not in time.
        """

    async def start(
        self, factory: Any, /, *args: Any, name: str, resources: Resources, timeout_s: float = 120.0, **kwargs: Any
    ) -> Actor:
        """Start a process and create ``factory(*args, **kwargs)`` in it. The factory must be importable there."""

    @property
    def store(self) -> Store:
        """Store for shared values."""

    @property
    def num_gpus(self) -> int:
        """Current number of GPUs in the cluster; a cluster that the run joined may grow."""

    async def inspect(self) -> Sequence[ProcessState]:
        """Report what every process of the run is doing, including those that do not respond, within a few seconds."""

    async def failure(self) -> str:
        """Wait until the cluster itself fails, and describe the failure. Never returns if it cannot fail."""

    async def close(self) -> None:
        """Stop every actor that is still running."""
