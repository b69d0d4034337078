"""A vocabulary that is split over ranks (tensor parallelism): what each rank knows of a row becomes what all need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .softmax_rows import RowStats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabShard:
    """The part of the vocabulary whose rows of the head this rank holds; the ranks of the group hold all of it."""

    group: dist.ProcessGroup
    first: int
    """Id of the first token of the part."""

    def combine(self, stats: RowStats) -> RowStats:
        """Statistics of the whole vocabulary from those of every rank's part: one maximum and one sum over ranks."""
        top = stats.norms.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        share = (stats.norms - top).exp()
        parts = [share, stats.chosen]
        if stats.means is not None:
            parts.append(torch.where(share > 0, share * stats.means, 0))  # a part may have no finite logit
        sums = torch.stack(parts)
        dist.all_reduce(sums, group=self.group)
        means = None if stats.means is None else sums[2] / sums[0]
        return RowStats(top + sums[0].log(), sums[1], means)

    def sum(self, tensor: Tensor) -> None:
        """Sum over the ranks of the group, in place."""
        dist.all_reduce(tensor, group=self.group)
