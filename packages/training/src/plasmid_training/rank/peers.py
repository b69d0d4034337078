"""The ranks that hold the other parts of a batch, as one of them sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..objective.metrics import StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanks:
    """One rank of every model replica, at this rank's place in it. All ranks call every method together.

    Implements `handover.Peers`.
    """

    rank: int
    """Which part of the batch."""
    num_ranks: int
    """Model replicas."""
    device: torch.device
    group: dist.ProcessGroup | None = None
    """None for all ranks of the trainer."""
    has_loss: bool = True
    """False where outputs go to another pipeline rank, which computes scores, advantages and losses."""
    reports: bool = True
    """True for the one rank of every replica whose results count."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, as a new tensor."""
        total = tensor.detach().clone().to(self.device)
        dist.all_reduce(total, group=self.group)
        return total

    def any(self, value: bool) -> bool:
        """True if it is on any rank."""
        return bool(self.all_reduce(torch.tensor(int(value))) > 0)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Values are pickled."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def reduce(self, metrics: StepMetrics) -> dict[str, float]:
        """Metrics of the step over all ranks."""
        return metrics.reduce(self.all_reduce, rank=self.rank, num_ranks=self.num_ranks)
