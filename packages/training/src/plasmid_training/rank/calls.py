"""The remote surface of a trainer's ranks, and what a rank is started with. Imports no torch: the driver reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plasmid.config.load import resolve
from plasmid.config.run import RunConfig
from plasmid.protocols import SyncPlan
from plasmid.types import Floats, Role, SyncReceipt

from ..batches.rank_batch import RankBatch

if TYPE_CHECKING:
    from .backend import RankBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Everything that a rank is started with. Picklable."""

    config: Mapping[str, Any]
    """``RunConfig.model_dump(mode="json")``; components are resolved in the rank's own process."""
    rank: int
    num_ranks: int
    device: str
    """``cpu`` or ``cuda``; a process sees one GPU."""
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """Which part of every batch a rank works on, known once it has met the others."""

    part: int
    """Ranks that share a model replica share a part."""
    reports: bool
    """True for the one rank of every part whose metrics and log-probabilities count."""


class Rank(Protocol):
    """What the trainer's handle calls on each rank, on all of them together; `RankProcess` implements it.

    Methods that are not coroutines run one after another in one thread.
    """

    def listen(self) -> str:
        """Open the store by which all ranks meet, and return its URL; rank 0 alone is asked."""
        ...

    def join(self, url: str) -> RankPosition:
        """Meet the other ranks and load the models. Raises `ModelError`."""
        ...

    def score(self, batch: RankBatch, roles: Sequence[Role]) -> None:
        """Compute and keep the scores of this rank's samples."""
        ...

    def train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        """Train on a batch with the scores that were kept, if any, then forget it; metrics of every optimizer step."""
        ...

    def logprobs(self, batch: RankBatch) -> tuple[Floats, ...]:
        """[L] log-probabilities of each of this rank's samples."""
        ...

    def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Send every weight of the policy; raises whatever the wire does."""
        ...

    def save(self, path: Path) -> bool:
        """Write this rank's shards, or begin to: True if `written` waits for them. Raises `CheckpointError`."""
        ...

    async def written(self) -> bytes:
        """Wait for the shards of a save; this rank may train meanwhile. Raises `CheckpointError`."""
        ...

    async def conclude(self, written: Sequence[bytes]) -> None:
        """Make a checkpoint of what all ranks have written; the first rank does it. Raises `CheckpointError`."""
        ...

    def load(self, path: Path) -> int:
        """Read this rank's shards; returns the policy's optimizer step. Raises `CheckpointError`."""
        ...

    def export(self, path: Path) -> None:
        """Gather all weights; rank 0 writes them as Hugging Face folders. Raises `CheckpointError`."""
        ...

    def offload(self) -> None:
        """Move weights and optimizers to host memory; nothing to do where they are there."""
        ...

    def onload(self) -> None:
        """Undo `offload`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Memory of this process and its GPU."""
        ...


MakeBackend = Callable[[RunConfig, str], "RankBackend"]
"""Makes a rank's backend in the rank's process, for a device: ``cpu`` or ``cuda``. Picklable."""


def launch(make_backend: MakeBackend, setup: RankSetup) -> Rank:
    """Make the rank, in its own process."""
    config = resolve(setup.config)
    backend = make_backend(config, setup.device)
    from .process import RankProcess

    return RankProcess(setup, config, backend)
