"""Remote interface of ranks, and their start-up arguments. Imports no torch, because the driver uses it.

Therefore `Rank`, `FrozenRank` and `CriticRank` are protocols with one implementation each, in modules that import
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plasmid.config.load import resolve
from plasmid.config.run import RunConfig
from plasmid.protocols import SampleScores, SyncPlan
from plasmid.types import Floats, Role, SyncResult

from ..batches.rank_batch import RankBatch

if TYPE_CHECKING:
    from .backend import RankBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Start-up arguments of a rank. Picklable."""

    config: Mapping[str, Any]
    """``RunConfig.model_dump(mode="json")``; components are resolved in the rank's own process."""
    role: Role
    """The model on these ranks: `Role.POLICY` for the trainer's, which may also hold others."""
    rank: int
    num_ranks: int
    device: str
    """``cpu`` or ``cuda``; a process sees one GPU."""
    threads: int
    run_dir: Path
    """Folder of the run, for the output of ``run.profile`` and ``run.token_values_every``."""

    @property
    def name(self) -> str:
        """Name of the process."""
        return f"{name_of(self.role)}-{self.rank}"


def name_of(role: Role) -> str:
    """Return the name of the ranks that hold this model."""
    return "trainer" if role is Role.POLICY else role.value


def reference_folder(path: Path) -> Path:
    """Return the folder of the reference for the trainer's checkpoint in ``path``."""
    return path.with_name(f"{path.name}-reference")


def critic_folder(path: Path) -> Path:
    """Return the folder of a critic on dedicated ranks for the trainer's checkpoint in ``path``."""
    return path.with_name(f"{path.name}-critic")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """Position of a rank among the data-parallel ranks, known after `Rank.join`."""

    part: int
    """Index of the rank's part of every batch; the ranks of a model replica have the same part."""
    reports: bool
    """True for the one rank of every part whose metrics and log-probabilities the driver uses."""


class ConnectedRank(Protocol):
    """Methods of every rank, which the driver calls on all ranks together; `ConnectedProcess` implements them.

    Methods that are not coroutines run sequentially in one thread.
    """

    def listen(self) -> str:
        """Open the rendezvous store of all ranks and return its URL; called on rank 0 only."""

    def join(self, url: str) -> RankPosition:
        """Connect to the other ranks and load the models. Raises `ModelError`."""

    def metrics(self) -> dict[str, float]:
        """Return memory metrics of this process and its GPU."""


class ScoringRank(ConnectedRank, Protocol):
    """Remote methods of all models on dedicated ranks, in addition to `ConnectedRank`."""

    def score(self, batch: RankBatch) -> tuple[SampleScores, ...]:
        """Return, for each of this rank's samples, the scores of its loss tokens; values of other tokens are 0."""


class FrozenRank(ScoringRank, Protocol):
    """Remote methods of a reference or teacher on dedicated ranks, implemented by `FrozenProcess`."""

    def load(self, path: Path) -> None:
        """Replace the weights by those of a Hugging Face folder. Raises `ModelError`."""

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder if the weights were replaced. Raises `CheckpointError`."""


class TrainedRank(ConnectedRank, Protocol):
    """Remote methods of all ranks with trained models."""

    def train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        """Train on a scored batch; return the metrics of every optimizer step."""

    def save(self, path: Path) -> bool:
        """Start writing this rank's shards; return True if `finish_shards` must be called. Raises `CheckpointError`."""

    async def finish_shards(self) -> bytes:
        """Wait for the shards of a save; this rank may train meanwhile. Raises `CheckpointError`."""

    async def commit_save(self, written: Sequence[bytes]) -> None:
        """Finish the checkpoint that all ranks have written; called on the first rank. Raises `CheckpointError`."""

    def load(self, path: Path) -> dict[str, int]:
        """Load this rank's shards; return the optimizer step of each model, by role. Raises `CheckpointError`."""

    def export(self, path: Path) -> None:
        """Gather all weights and write them as Hugging Face folders on rank 0. Raises `CheckpointError`."""


class CriticRank(ScoringRank, TrainedRank, Protocol):
    """Remote methods of a critic on dedicated ranks, implemented by `CriticProcess`."""


class Rank(TrainedRank, Protocol):
    """Remote methods of the trainer's ranks, implemented by `RankProcess`."""

    def score(self, batch: RankBatch, roles: Sequence[Role]) -> None:
        """Compute and cache the scores of this rank's samples."""

    def returns(self, batch: RankBatch) -> tuple[Floats, ...]:
        """Return, for each of this rank's scored samples, the targets [L] of the critic's values."""

    def logprobs(self, batch: RankBatch) -> tuple[Floats, ...]:
        """Return the policy's log-probabilities [L] for each of this rank's samples."""

    def send(self, plan: SyncPlan, version: int) -> SyncResult:
        """Send all weights of the policy. Raises the errors of the plan's `Wire`."""

    def offload(self) -> None:
        """Move weights and optimizer state to host memory; no effect if they are there."""

    def onload(self) -> None:
        """Undo `offload`."""

    def write_policy(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder in fp32, which is lossless. Raises `CheckpointError`."""


MakeBackend = Callable[[RunConfig, str], "RankBackend"]
"""Creates a rank's backend in the rank's process, for the device ``cpu`` or ``cuda``. Picklable."""


def launch(make_backend: MakeBackend, setup: RankSetup) -> ConnectedRank:
    """Create the rank, in its own process."""
    config = resolve(setup.config, again=False)
    backend = make_backend(config, setup.device)
    from .critic_process import CriticProcess
    from .frozen_process import FrozenProcess
    from .process import RankProcess

    make = {Role.POLICY: RankProcess, Role.CRITIC: CriticProcess}.get(setup.role, FrozenProcess)
    return make(setup, config, backend)
