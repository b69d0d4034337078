"""Communication among the data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanks:
    """Data-parallel group: the ranks at the same position in all replicas. All ranks call every method together."""

    rank: int
    """Index of the rank's part of the batch."""
    num_ranks: int
    """Number of model replicas."""
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Process group; None for the default group of all ranks."""
    has_loss: bool = True
    """False if another pipeline rank gets the outputs and computes scores, advantages and losses."""
    reports: bool = True
    """True for the one rank of every replica whose results the driver uses."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks as a new tensor."""
        total = tensor.detach().clone().to(self.device)
        dist.all_reduce(total, group=self.group)
        return total

    def any(self, value: bool) -> bool:
        """Return True if ``value`` is True on any rank."""
        return bool(self.all_reduce(torch.tensor(int(value))) > 0)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order. Values are pickled."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values
