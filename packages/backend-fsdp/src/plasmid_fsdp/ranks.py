"""This rank among all ranks, and what they do together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from plasmid_training.objective.metrics import StepMetrics
from torch import Tensor

from .launch import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The process group, as one rank sees it. All ranks call every method together."""

    shard: Shard
    device: torch.device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, as a new tensor."""
        total = tensor.detach().clone().to(self.device)
        dist.all_reduce(total)
        return total

    def any(self, value: bool) -> bool:
        """True if it is on any rank."""
        return bool(self.all_reduce(torch.tensor(int(value))) > 0)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Values are pickled."""
        values: list[Any] = [None] * self.shard.num_ranks
        dist.all_gather_object(values, value)
        return values

    def reduce(self, metrics: StepMetrics) -> dict[str, float]:
        """Metrics of the step over all ranks."""
        return metrics.reduce(self.all_reduce, rank=self.shard.rank, num_ranks=self.shard.num_ranks)
