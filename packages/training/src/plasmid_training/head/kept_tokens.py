"""Log-probabilities within the tokens that restricted sampling (top-p, top-k) could choose from.

log p(token | kept) = z(token) - log of the sum of exp(z) over the kept tokens, with z = logits / temperature; its
gradient is 0 at all other tokens. DeepSeek-V3.2 (arXiv 2512.02556, section 3.1) keeps the sampling mask likewise.
P positions, k kept tokens in total, C positions of a chunk, V tokens of (one rank's shard of) the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from plasmid.types.kept_sets import KeptSet
from plasmid_models.kernels.softmax_rows import RowStats
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTokens:
    """The tokens that sampling kept at each of P positions; an empty set means the whole vocabulary."""

    token_ids: Tensor
    """[k] int32, concatenated over positions."""
    offsets: NDArray[np.int64]
    """[P + 1] start of each position's set; on the host, so that slicing does not synchronize with the GPU."""

    @staticmethod
    def of(kept: KeptSet) -> KeptTokens:
        return KeptTokens(token_ids=torch.from_numpy(kept.token_ids.astype(np.int32)), offsets=kept.offsets)

    def to(self, device: torch.device | str, **options: Any) -> KeptTokens:
        """Return a copy on a device."""
        return KeptTokens(token_ids=self.token_ids.to(device, **options), offsets=self.offsets)

    def select(self, positions: NDArray[np.int64]) -> KeptTokens:
        """Return the sets of the given positions, in their order. Works on the host only."""
        sizes = np.diff(self.offsets)[positions]
        spans = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in positions]
        tokens = np.concatenate([np.zeros(0, np.int64), *spans])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        return KeptTokens(token_ids=self.token_ids[torch.from_numpy(tokens)], offsets=offsets)

    def restricted(self) -> Tensor:
        """[P] bool: the position has a set."""
        return torch.from_numpy(np.diff(self.offsets) > 0).to(self.token_ids.device)

    def chunk(self, chunk: slice) -> KeptRows:
        """Return the sets of a chunk of positions."""
        offsets = self.offsets[chunk.start : chunk.stop + 1]
        token_ids = self.token_ids[int(offsets[0]) : int(offsets[-1])].long()
        sizes = torch.from_numpy(np.diff(offsets)).to(token_ids.device)
        rows = torch.repeat_interleave(sizes, output_size=len(token_ids))
        return KeptRows(token_ids=token_ids, sizes=sizes, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptRows:
    """Kept sets of the rows of one chunk of logits."""

    token_ids: Tensor
    """[k] int64"""
    sizes: Tensor
    """[C] int64"""
    rows: Tensor
    """[k] int64: row of each kept token, 0..C-1, ascending."""

    @property
    def restricted(self) -> Tensor:
        """[C] bool: the row has a set."""
        return self.sizes > 0

    def stats(self, logits: Tensor, temperatures: Tensor, *, first: int) -> RowStats:
        """Compute statistics over the kept tokens with ids ``first`` to ``first`` + V - 1; sums are 0 without any.

        Uses segment reductions, because the order of index_add on a GPU changes from run to run.
        """
        z = self._scale_logits(logits, temperatures, first)
        lowest = torch.finfo(z.dtype).min
        tops = torch.segment_reduce(z, "max", lengths=self.sizes, initial=lowest, unsafe=True)
        sums = torch.segment_reduce((z - tops[self.rows]).exp(), "sum", lengths=self.sizes, unsafe=True)
        return RowStats(tops, sums, torch.zeros_like(tops), None)

    def gradient(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, stats: RowStats, up: Tensor, *, first: int
    ) -> Tensor:
        """Return the gradient [k] of the kept logits; ``stats`` are those of the sets over all ranks."""
        z = self._scale_logits(logits, temperatures, first)
        probs = (z - stats.tops[self.rows]).exp() / stats.sums[self.rows]
        slope = (up / temperatures.to(up.dtype))[self.rows]
        return slope * ((self.token_ids == targets[self.rows]).to(slope.dtype) - probs)

    def add(self, values: Tensor, grad_logits: Tensor, *, first: int, sharded: bool) -> None:
        """Add ``values`` [k] to the gradients [C, V] of this rank's logits at the kept tokens."""
        rows, places = self.rows, self.token_ids - first
        if sharded:
            here = (places >= 0) & (places < grad_logits.shape[1])
            rows, places, values = rows[here], places[here], values[here]
        grad_logits[rows, places] += values.to(grad_logits.dtype)  # correct because the tokens of a row are distinct

    def _scale_logits(self, logits: Tensor, temperatures: Tensor, first: int) -> Tensor:
        """Return z [k] of each kept token; -inf for tokens in other ranks' shards."""
        high = torch.promote_types(logits.dtype, torch.float32)
        places = self.token_ids - first
        width = logits.shape[1]
        if not width:
            return logits.new_full((len(places),), -torch.inf, dtype=high)
        z = logits[self.rows, places.clamp(0, width - 1)].to(high) / temperatures[self.rows].to(high)
        return z.masked_fill_((places < 0) | (places >= width), -torch.inf)
