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
        tops = stats.tops.clone()
        dist.all_reduce(tops, dist.ReduceOp.MAX, group=self.group)
        sums, chosen = both = torch.stack([stats.sums * (stats.tops - tops).exp(), stats.chosen])
        dist.all_reduce(both, group=self.group)
        return RowStats(tops, sums, chosen, None if stats.entropy is None else self._entropy(stats, tops, sums))

    def _entropy(self, stats: RowStats, tops: Tensor, sums: Tensor) -> Tensor:
        """A part with probability P and an entropy H of its own adds P (H - log P)."""
        assert stats.entropy is not None
        log_share = (stats.tops - tops) + (stats.sums / sums).log()
        share = log_share.exp()
        entropy = torch.where(share > 0, share * (stats.entropy - log_share), 0)  # a part may have no finite logit
        dist.all_reduce(entropy, group=self.group)
        return entropy

    def sum(self, tensor: Tensor) -> None:
        """Sum over the ranks of the group, in place."""
        dist.all_reduce(tensor, group=self.group)
