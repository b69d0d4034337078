"""What a trainer's package implements for one rank: process groups, models, optimizers, and their state on disk.

Everything else of a rank is in this folder, once for all trainers. All ranks call every method together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from plasmid_models.source import Source
from torch import Tensor

from ..batches.collate import Microbatch
from ..learning_settings import LearningSettings
from ..offload import Offloaded
from .peers import PeerRanks

Consume = Callable[[Microbatch, Any], Tensor]
"""Takes a microbatch, on its device, and the model's output for it; returns the microbatch's part of the loss."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did."""

    norm: float
    """Of the whole gradient, before it was clipped."""
    taken: bool
    """False if the gradient was not finite."""


class RankOptimizer(Protocol):
    """The optimizer of one model."""

    def step(self, lr: float) -> Update:
        """Clip and take one step along the gradients, which are gone afterwards."""
        ...


class RankModel(Protocol):
    """This rank's part of one model. The output of a policy is `TokenScores`, that of a critic is values [P]."""

    @property
    def learning(self) -> LearningSettings:
        """How fast it learns, if it is trained."""
        ...

    def make_optimizer(self) -> RankOptimizer:
        """Prepare the model for training. Called once, after models that share its weights were loaded."""
        ...

    def run(self, microbatches: Iterable[Microbatch], consume: Consume, *, train: bool, **options: bool) -> None:
        """Forward over microbatches, which are on the CPU; ``options`` go to the model's forward.

        ``consume`` is called for each, on the ranks that have the output. With ``train`` what it returns is
        differentiated, and gradients are summed over ranks.
        """
        ...

    def shards(self) -> Sequence[Tensor]:
        """The live weights of this rank, sharing their memory, in the same order every time."""
        ...

    def load(self, source: Source) -> None:
        """Fill the live weights from another folder of the same architecture. Raises `ModelError`."""
        ...

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole, by its name in the model's folder, in ``dtype`` unless engines have it in another."""
        ...

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """Bytes of every tensor of `weights`, in its order."""
        ...

    def untrained(self, source: Source) -> Iterable[tuple[str, Tensor]]:
        """Further tensors of the model's folder, read as they are asked for, that an exported one has as they are."""
        ...

    def offload(self, memory: Offloaded) -> None:
        """Move out everything of the model and its optimizer that lies on the GPU."""
        ...


class Writing(Protocol):
    """A checkpoint on its way to the disk."""

    async def written(self) -> bytes:
        """Wait for this rank's files; what they hold, for `conclude`. Raises `CheckpointError`."""
        ...

    def conclude(self, written: Sequence[bytes]) -> None:
        """Make a checkpoint of all ranks' files; the first rank does it. Raises `CheckpointError`."""
        ...


class RankBackend(Protocol):
    """One rank of one kind of trainer."""

    def open(self) -> PeerRanks:
        """Make the process groups; torch's default group exists. Raises `ModelError`."""
        ...

    def build_policy(self, source: Source) -> RankModel:
        """Load the policy. Raises `ModelError`."""
        ...

    def build_critic(self, source: Source) -> RankModel:
        """Load the critic. Raises `ModelError`."""
        ...

    def build_frozen(self, source: Source) -> RankModel:
        """Load a language model that is scored and never trained. Raises `ModelError`."""
        ...

    def step_metrics(self) -> dict[str, float]:
        """Metrics of its own that every optimizer step of the policy reports."""
        ...

    def save(self, path: Path, steps: Mapping[str, int]) -> Writing | None:
        """Write weights, optimizers and generators of the trained models, and their optimizer steps, by role.

        Returns what is still being written. Raises `CheckpointError`.
        """
        ...

    def load(self, path: Path) -> Mapping[str, int]:
        """Read what `save` wrote, on any number of ranks; returns the steps. Raises `CheckpointError`."""
        ...

    def close(self) -> None:
        """Give up the models, and leave the process groups that `open` made; torch's default group still exists."""
        ...
