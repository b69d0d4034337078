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
        """Statistics of the whole vocabulary from those of every rank's part: a maximum and two sums over ranks."""
        top = stats.norms.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        share = (stats.norms - top).exp()
        sums = torch.stack([share, stats.chosen])
        dist.all_reduce(sums, group=self.group)
        norms = top + sums[0].log()
        return RowStats(norms, sums[1], None if stats.entropy is None else self._entropy(stats, norms))

    def _entropy(self, stats: RowStats, norms: Tensor) -> Tensor:
        """Each part's is that of its own softmax; its share of the whole makes it H_part + norm - norm_part."""
        assert stats.entropy is not None
        behind = norms - stats.norms
        share = (-behind).exp()
        entropy = torch.where(share > 0, share * (stats.entropy + behind), 0)  # a part may have no finite logit
        dist.all_reduce(entropy, group=self.group)
        return entropy

    def sum(self, tensor: Tensor) -> None:
        """Sum over the ranks of the group, in place."""
        dist.all_reduce(tensor, group=self.group)
