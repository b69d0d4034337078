"""Interface of a trainer for the training loop, and data types of weight syncs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..types import Floats, Role, SyncResult
from ..types.batch import BatchRef
from ..types.top_tokens import TopTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """A batch of weights, flattened and concatenated into one contiguous tensor."""

    index: int
    names: tuple[str, ...]
    """Hugging Face names."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    """Torch names without the module: ``bfloat16``."""
    data: Tensor
    """[bytes] uint8, on the sender's device."""
    checksum: int
    """`plasmid_models.sync.checksum` of ``data``, computed by the sender."""
    is_last: bool = False
    """True for the last bucket of a sync."""


class Sender(Protocol):
    """Sends weights in an engine's wire format from a trainer rank."""

    def send(self, bucket: Bucket) -> None:
        """Send a bucket. May return before it has arrived."""

    def close(self, *, ok: bool) -> None:
        """Wait until all buckets have arrived; with ``ok=False``, tell the receiver that the transfer was aborted."""


class Wire(Protocol):
    """Describes how to send weights to an engine. Created by the engine and pickled to the trainer's ranks."""

    senders: Literal["first", "all", "divided"]
    """Sending ranks: only rank 0; all ranks, each of which sends all weights (IPC); or all ranks, each of which sends a
    share of the buckets. Buckets of one sync have different indices, and the last index is marked."""

    def open(self, *, rank: int, version: int) -> Sender:
        """Start sending one version from this rank."""


AdapterSync = Literal["merged", "with_base", "alone"]
"""Weights to send of a policy with an adapter: merged weights, the adapter and then its base, or only the adapter if
the engine has received the base before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SyncPlan:
    """Parameters of the transfer of one policy version to one engine. Valid for one sync."""

    wire: Wire
    dtype: str = "auto"
    """Dtype to which weights are cast before sending; ``auto`` is the model's dtype."""
    bucket_bytes: int = 256 << 20
    """Maximum size of a bucket, in bytes; a larger tensor is sent alone."""
    adapter: AdapterSync = "merged"
    adapter_dtype: str = ""
    """Dtype to which the adapter's matrices are cast before sending, if they are not merged; empty for ``dtype``."""


SampleScores = Floats | TopTokens
"""Scores of one sample by one model: [L] log-probabilities or values, or the top tokens at its loss tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresRef:
    """Reference to per-token scores, most of which stay on the trainer's ranks."""

    batch: int
    """Index of the batch that was scored."""
    roles: tuple[Role, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    received: Mapping[Role, tuple[SampleScores, ...]] = field(default_factory=dict)
    """Scores of each sample, in batch order, by models on dedicated ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Result of training on one batch."""

    steps: tuple[Mapping[str, float], ...]
    """Metrics of each optimizer step, reduced over ranks: ``train/loss``, ``train/grad_norm``, ``train/lr``, ..."""


Finish = Callable[[], Awaitable[None]]
"""Waits until a checkpoint is completely written. Raises `CheckpointError`."""


class Trainer(Protocol):
    """One handle for a group of ranks with the policy, its optimizer and, if needed, the other roles."""

    @property
    def step(self) -> int:
        """Number of optimizer steps since the start of the run."""

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        """Compute per-token scores of every sample. They stay on the ranks until the batch has been trained."""

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        """Take ``batch.steps`` optimizer steps. The ranks compute the algorithm's advantages and loss."""

    async def logprobs(self, batch: BatchRef) -> tuple[Any, ...]:
        """Compute the policy's log-probabilities, a float32 array [L] per sample, in batch order.

        Used by canaries and tests.
        """

    async def send(self, plan: SyncPlan, version: int) -> SyncResult:
        """Publish: send all weights as planned. Runs concurrently with `RolloutEngine.receive`."""

    async def save(self, path: Path) -> Finish | None:
        """Write sharded weights, optimizer, schedule and random generators into the folder.

        Returns None if everything is written. A trainer that writes a copy in the background while training continues
        returns a function that waits until the checkpoint is complete. This function is called before the next `save`,
        concurrently with other methods.
        """

    async def load(self, path: Path) -> None:
        """Restore the exact state that `save` wrote, also with a different number of ranks."""

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder: weights, config and tokenizer."""

    async def offload(self) -> None:
        """Move everything off the GPU, to make room for a colocated engine."""

    async def onload(self) -> None:
        """Undo `offload`."""

    async def metrics(self) -> Mapping[str, float]:
        """Return current gauges: memory by rank, and utilization and power of GPUs."""

    async def close(self) -> None:
        """Stop the ranks."""
