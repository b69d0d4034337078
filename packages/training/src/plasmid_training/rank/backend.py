"""Protocols that a trainer's package implements for each rank: process groups, models, optimizers, and checkpoints.

All trainers share the rest of this folder. Every method is collective: all ranks call it together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from plasmid_models.source import Source
from plasmid_models.sync import Gatherable, Round
from torch import Tensor

from ..batches.collate import Microbatch
from ..batches.peers import PeerRanks
from ..learning_settings import LearningSettings
from ..offload import OffloadedMemory

Consume = Callable[[Microbatch, Any], Tensor]
"""Maps a microbatch on its device and the model's output for it to the microbatch's part of the loss."""


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one optimizer step."""

    norm: float
    """Global gradient norm before clipping."""
    taken: bool
    """False if the step was skipped, because the gradient was not finite."""


class RankOptimizer(Protocol):
    """The optimizer of one model."""

    def step(self, lr: float) -> Update:
        """Clip the gradients, take one step and clear them."""


class ShareSource(Protocol):
    """Weights for a sync. The ranks can divide them, without each gathering all of them."""

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights by name, each gathered from all ranks. Collective: every rank must iterate."""

    def gatherables(self, dtype: torch.dtype) -> list[Gatherable]:
        """Return all weights, the same on every rank, with their bytes in ``dtype``."""

    def shares(
        self, rounds: Sequence[Round], *, dtype: torch.dtype, device: torch.device
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield one list per round, with the tensors of the weights that this rank sends.

        A round's gathers are complete when its list is yielded.
        """


class Adapter(ShareSource, Protocol):
    """A low-rank adapter of a policy. Only the adapter is trained; the policy's own weights, its base, are frozen."""

    def disable(self) -> AbstractContextManager[None]:
        """Context in which outputs and `RankModel.weights` are those of the base. All ranks enter it together."""

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield both whole matrices of every adapted layer: ``<layer>.lora_A`` [r, in], ``<layer>.lora_B`` [out, r]."""

    def config(self, base: str) -> dict[str, Any]:
        """Return the ``adapter_config.json`` of the `peft` package; ``base`` is the folder of the base model."""


class RankModel(ShareSource, Protocol):
    """This rank's part of one model. A policy outputs `TokenScores`; a critic outputs values [P] of P scored tokens."""

    @property
    def adapter(self) -> Adapter | None:
        """The adapter; None if the model has none."""

    @property
    def learning(self) -> LearningSettings:
        """Learning settings of a trained model."""

    def make_optimizer(self) -> RankOptimizer:
        """Create the optimizer. Called once, after models that share the weights are loaded."""

    @property
    def fuses_loss(self) -> bool:
        """True if `run` supports the option ``token_loss``, a function from a microbatch to its `ChunkLoss`.

        The output is then `LossAndScores` instead of `TokenScores`.
        """

    def run(self, microbatches: Iterable[Microbatch], consume: Consume, *, train: bool, **options: Any) -> None:
        """Run the model on microbatches, which are on the CPU; ``options`` are passed to the model's forward.

        Calls ``consume`` for each microbatch on the ranks that have the output. With ``train``, runs the backward pass
        on its result and sums gradients over ranks.
        """

    def shards(self) -> Sequence[Tensor]:
        """Return this rank's shards of the live weights, sharing their memory, always in the same order."""

    def load(self, source: Source) -> None:
        """Load the live weights from another folder of the same architecture. Raises `ModelError`."""

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield all unsharded weights by their names in the model folder, in ``dtype`` unless their dtype is fixed.

        An adapter is merged into them.
        """

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes of every tensor of `weights`, in the same order."""

    def offload(self, memory: OffloadedMemory) -> None:
        """Move all GPU memory of the model and its optimizer to host memory."""


class PendingSave(Protocol):
    """A checkpoint that is being written."""

    async def finish_shards(self) -> bytes:
        """Wait for this rank's files; return their index for `commit`. Raises `CheckpointError`."""

    def commit(self, written: Sequence[bytes]) -> None:
        """Finish the checkpoint from all ranks' files; called on the first rank. Raises `CheckpointError`."""


class RankBackend(Protocol):
    """One rank of one kind of trainer."""

    def open(self) -> PeerRanks:
        """Create the process groups; torch's default group already exists. Raises `ModelError`."""

    def build_policy(self, source: Source) -> RankModel:
        """Load the policy. Raises `ModelError`."""

    def build_critic(self, source: Source) -> RankModel:
        """Load the critic. Raises `ModelError`."""

    def build_frozen(self, source: Source) -> RankModel:
        """Load a language model that is scored and never trained. Raises `ModelError`."""

    def step_metrics(self) -> dict[str, float]:
        """Return the backend's own metrics for every optimizer step of the policy."""

    def save(self, path: Path, steps: Mapping[str, int]) -> PendingSave | None:
        """Write weights, optimizers, random generators and optimizer steps (by role) of the trained models.

        Returns a handle if files are still being written, else None. Raises `CheckpointError`.
        """

    def load(self, path: Path, roles: Collection[str]) -> Mapping[str, int]:
        """Load the trained models of this rank from what `save` wrote on any number of ranks; return their steps.

        ``roles`` are all models that the folder must contain. Raises `CheckpointError`.
        """

    def close(self) -> None:
        """Release the models and destroy the process groups of `open`; torch's default group still exists."""
