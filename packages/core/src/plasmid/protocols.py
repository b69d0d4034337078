"""What the running parts promise each other: called by the loop, implemented at the edges."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from .batch import BatchRef
from .types import Completion, GenerateRequest, Role, SyncReceipt

if TYPE_CHECKING:
    from torch import Tensor

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


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
    """A `plasmid.run.cluster.node_agent.NodeAgent` there; None for the driver's own machine."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Some weights, flattened one after another into one contiguous tensor."""

    index: int
    names: tuple[str, ...]
    """Hugging Face names."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    """Torch names without the module: ``bfloat16``."""
    data: Tensor
    """[bytes] uint8, on the sender's device."""
    checksum: int
    """`plasmid.sync.checksum` of ``data``, taken by the sender."""
    is_last: bool = False
    """Nothing comes after it."""


class Sender(Protocol):
    """The sending half of one engine's wire format, opened on a trainer rank."""

    def send(self, bucket: Bucket) -> None:
        """Hand over one bucket; may return before it has arrived."""
        ...

    def close(self, *, ok: bool) -> None:
        """Wait until everything has arrived; with ``ok=False`` tell the receiver that no more will come."""
        ...


class Wire(Protocol):
    """How to reach an engine with weights. Made by the engine, pickled to the trainer's ranks."""

    senders: Literal["first", "all"]
    """Which ranks send: rank 0 alone, or each its own copy (IPC, NCCL)."""

    def open(self, *, rank: int, version: int) -> Sender:
        """Start sending one version from this rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SyncPlan:
    """How one policy version travels to one engine. Valid for one sync."""

    wire: Wire
    dtype: str = "auto"
    """What weights are cast to before they are sent; ``auto`` is the model's own."""
    bucket_bytes: int = 256 << 20
    """Largest bucket; a larger tensor travels alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresRef:
    """Names per-token scores that stayed on the trainer's ranks."""

    batch: int
    """Index of the batch that was scored."""
    roles: tuple[Role, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What training on one batch gave."""

    steps: tuple[Mapping[str, float], ...]
    """Metrics of each optimizer step, reduced over ranks: ``train/loss``, ``train/grad_norm``, ``train/lr``, ..."""


Finish = Callable[[], Awaitable[None]]
"""Waits until everything of a save is written. Raises `CheckpointError`."""


class Trainer(Protocol):
    """A group of ranks behind one handle. Holds the policy, its optimizer and, as needed, the other roles."""

    @property
    def step(self) -> int:
        """Optimizer steps taken since the start of the run."""
        ...

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        """Per-token scores of every sample; they stay on the ranks until the batch has been trained."""
        ...

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        """``batch.steps`` optimizer steps; the algorithm's advantages and loss run on the ranks."""
        ...

    async def logprobs(self, batch: BatchRef) -> tuple[Any, ...]:
        """[L] float32 array of the policy's log-probabilities per sample, in batch order; for canaries and tests."""
        ...

    async def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Publish: send every weight along the plan's wire. Runs together with `RolloutEngine.receive`."""
        ...

    async def save(self, path: Path) -> Finish | None:
        """Write weights, optimizer, schedule and generators into the folder, sharded.

        None once everything is written. A trainer that goes on writing, from a copy that training does not change,
        returns what waits for the end; it is called before the next `save`, and may run beside all other methods.
        """
        ...

    async def load(self, path: Path) -> None:
        """Take up exactly where `save` left off, also with another number of ranks."""
        ...

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder: weights, config and tokenizer."""
        ...

    async def offload(self) -> None:
        """Move everything off the GPU, so that a colocated engine can have it."""
        ...

    async def onload(self) -> None:
        """Undo `offload`."""
        ...

    async def metrics(self) -> Mapping[str, float]:
        """Gauges now: memory by rank, GPU utilisation and power where there is one."""
        ...

    async def close(self) -> None:
        """Stop the ranks."""
        ...


class EngineClient(Protocol):
    """The half of an engine that workflows use. Picklable: every rollout worker gets one."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue the tokens. A failure that concerns this request alone is a completion with an error."""
        ...

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests early; their completions keep the tokens so far and say ``abort``."""
        ...

    async def leave(self, session_ids: Sequence[str]) -> None:
        """These sessions ask for nothing more (see `RolloutEngine.expect`)."""
        ...


PauseMode = Literal["wait", "abort", "in_place"]


class RolloutEngine(Protocol):
    """Engines behind one handle: one on a laptop, hundreds behind a router on a cluster."""

    @property
    def client(self) -> EngineClient:
        """What rollout workers talk to."""
        ...

    @property
    def pause_mode(self) -> PauseMode:
        """What the loop asks of `pause` before a weight sync."""
        ...

    def needs_weights(self) -> bool:
        """True if a part that was started anew waits for the present weights; the loop sends them when it can.

        Raises `EngineError` when too little of the engine is left. False for engines that restart nothing.
        """
        ...

    async def expect(self, session_ids: Sequence[str]) -> None:
        """Promise requests from these sessions, so that an engine that can do so batches them reproducibly.

        Such an engine takes no step while an expected session that has not left is without a request; its results then
        depend on the set of requests only, never on when they arrive. Others may ignore it.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens: ``wait`` for running requests, ``abort`` them, or hold them ``in_place``."""
        ...

    async def resume(self) -> None:
        """Undo `pause`."""
        ...

    async def plan_sync(self) -> SyncPlan:
        """How to send the next version: which wire, which type, how large the buckets are.

        Waits while no part of the engine runs and some are being started.
        """
        ...

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Update: take over every weight of the version, completely or not at all as far as requests can see.

        Raises `EngineLostError` if every part that was to take them went away: the loop then tries again.
        """
        ...

    async def checksum(self) -> Mapping[str, int]:
        """`plasmid.sync.checksum` of every tensor that the engine holds, read back from it, by Hugging Face name."""
        ...

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Give up GPU memory; without ``keep_weights`` a weight sync comes before anything is drawn again."""
        ...

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Take GPU memory again; without ``kv_cache`` only as much as a weight sync needs."""
        ...

    async def health(self) -> None:
        """Raises `EngineError` if the engine cannot serve."""
        ...

    async def metrics(self) -> Mapping[str, float]:
        """Gauges and counters: ``engine/tokens_per_s``, ``engine/running``, ``engine/queued``, ..."""
        ...

    async def close(self) -> None:
        """Stop the engines."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunContext:
    """What light components may use once a run has begun (`Component.open`)."""

    seed: int
    run_dir: Path
    engine: EngineClient | None = None
    """None where no engine is started."""
