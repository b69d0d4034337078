"""Log-probabilities of the teacher's top tokens: those of a chunk of logits, their choice, and their gradient.

C positions of a chunk, K top tokens of each, V tokens of (one rank's shard of) the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from plasmid.types.top_tokens import TopChoice
from plasmid_models.kernels.softmax_rows import RowGradients, RowStats
from torch import Tensor

from .vocab_shard import VocabShard


class TopStats(NamedTuple):
    """Scaled logits z = logits / temperature of K tokens of each row."""

    ids: Tensor
    """[C, K] int64: token ids of the whole vocabulary, distinct within a row."""
    z: Tensor
    """[C, K]; before `combine`, 0 for given tokens in another rank's shard."""

    @staticmethod
    def of(logits: Tensor, ids: Tensor, temperatures: Tensor, *, first: int) -> TopStats:
        """Read the logits [C, V] of given tokens; ``first`` is the id of the first of the V tokens."""
        high = torch.promote_types(logits.dtype, torch.float32)
        places, width = ids - first, logits.shape[1]
        if not width:
            return TopStats(ids, logits.new_zeros(ids.shape, dtype=high))
        z = logits.gather(1, places.clamp(0, width - 1)).to(high) / temperatures[:, None].to(high)
        return TopStats(ids, z.masked_fill_((places < 0) | (places >= width), 0))

    @staticmethod
    def choose(logits: Tensor, choice: TopChoice, temperatures: Tensor, *, first: int) -> TopStats:
        """Choose the K most likely tokens of each row. If the shard has fewer, the missing entries have z = -inf."""
        high = torch.promote_types(logits.dtype, torch.float32)
        own = min(max(choice.num_tokens - first, 0), logits.shape[1])
        found = logits[:, :own].topk(min(choice.count, own), dim=1)
        z = logits.new_full((len(logits), choice.count), -torch.inf, dtype=high)
        ids = torch.zeros_like(z, dtype=torch.int64)
        z[:, : found.values.shape[1]] = found.values.to(high) / temperatures[:, None].to(high)
        ids[:, : found.indices.shape[1]] = found.indices + first
        return TopStats(ids, z)

    def combine(self, shard: VocabShard, *, chosen: bool) -> TopStats:
        """Combine the statistics of all ranks: of given tokens, or with ``chosen``, of those that each rank chose."""
        if not chosen:
            z = self.z.clone()
            shard.sum(z)
            return TopStats(self.ids, z)
        found = shard.gather(self.z).topk(self.z.shape[1], dim=1)
        return TopStats(shard.gather(self.ids).gather(1, found.indices), found.values)

    def logprobs(self, full: RowStats) -> Tensor:
        """Return log-probabilities [C, K]; ``full`` are the statistics of the rows over the whole vocabulary."""
        return (self.z - full.tops[:, None]) - full.sums.log()[:, None]

    def write_gradient(
        self,
        grad: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        full: RowStats,
        upstream: RowGradients,
        up_logprobs: Tensor,
        up: Tensor,
        *,
        first: int,
        sharded: bool,
    ) -> None:
        """Replace the gradient of the top tokens and of the target in ``grad`` [C, V], the result of `GradientKernel`.

        The kernel was called with ``upstream``, whose gradient of the target's log-probability is the sum of
        ``up_logprobs`` [C] and ``up`` [C, K]. Its result is correct for all other tokens j, because dlogp_i/dz_j is
        -p_j for every i other than j.
        """
        same = (self.ids == targets[:, None]).to(up.dtype)
        ids = torch.cat([self.ids, targets[:, None]], 1)
        z = torch.cat([self.z, full.chosen[:, None]], 1)
        own = torch.cat([up + same * up_logprobs[:, None], (up_logprobs + (same * up).sum(1))[:, None]], 1)
        logprobs = TopStats(ids, z).logprobs(full)
        probs = logprobs.exp()
        values = own - upstream.up_logprobs[:, None] * probs
        if upstream.entropy is not None and upstream.up_entropy is not None:
            finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
            values -= upstream.up_entropy[:, None] * (finite + upstream.entropy[:, None]) * probs
        values = (values / temperatures[:, None].to(values.dtype)).to(grad.dtype)
        places = ids - first
        if not sharded:
            grad.scatter_(1, places, values)  # a target among the top tokens has the same value twice
            return
        rows, columns = ((places >= 0) & (places < grad.shape[1])).nonzero(as_tuple=True)
        grad[rows, places[rows, columns]] = values[rows, columns]
