"""Reductions over a vocabulary that is sharded over ranks (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from plasmid_models.kernels.softmax_rows import RowStats
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabShard:
    """This rank's shard of the vocabulary; the ranks of the group hold all of it."""

    group: dist.ProcessGroup
    first: int
    """Id of the first token of the shard."""

    def combine(self, stats: RowStats) -> RowStats:
        """Reduce the statistics of all ranks' shards to those of the whole vocabulary: a maximum and two sums."""
        tops = stats.tops.clone()
        dist.all_reduce(tops, dist.ReduceOp.MAX, group=self.group)
        sums, chosen = both = torch.stack([stats.sums * (stats.tops - tops).exp(), stats.chosen])
        dist.all_reduce(both, group=self.group)
        return RowStats(tops, sums, chosen, None if stats.entropy is None else self._entropy(stats, tops, sums))

    def _entropy(self, stats: RowStats, tops: Tensor, sums: Tensor) -> Tensor:
        """Combine entropies: a shard with probability P and entropy H contributes P (H - log P)."""
        assert stats.entropy is not None
        log_share = (stats.tops - tops) + (stats.sums / sums).log()
        share = log_share.exp()
        entropy = torch.where(share > 0, share * (stats.entropy - log_share), 0)  # a shard may have no finite logit
        dist.all_reduce(entropy, group=self.group)
        return entropy

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate [C, K] of every rank to [C, ranks * K], in rank order."""
        parts = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, 1)

    def sum(self, tensor: Tensor) -> None:
        """Sum over the ranks of the group, in place."""
        dist.all_reduce(tensor, group=self.group)
