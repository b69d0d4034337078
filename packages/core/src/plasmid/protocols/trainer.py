"""What a trainer promises the loop, and the parts of a weight sync between it and an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..types import Role, SyncReceipt
from ..types.batch import BatchRef

if TYPE_CHECKING:
    from torch import Tensor


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
    """`plasmid_models.sync.checksum` of ``data``, taken by the sender."""
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
