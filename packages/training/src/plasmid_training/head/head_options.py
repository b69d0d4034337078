"""Options and statistics of a linear head: kept sets or the whole vocabulary, on one rank or sharded.

P positions, C positions of a chunk, V vocabulary size (of this rank's shard).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from plasmid_models.kernels.softmax_rows import RowGradients, RowStats, SoftmaxKernels, kernels_for
from torch import Tensor

from .kept_tokens import KeptRows, KeptTokens
from .linear_head import ChunkSize
from .vocab_shard import VocabShard


class HeadSettings(TypedDict, total=False):
    """Options of callers."""

    with_entropy: bool
    """Compute the entropy; by default True."""
    entropy_grad: bool
    """Make the entropy differentiable; by default False."""
    chunk_size: ChunkSize
    """Positions whose logits are computed at once; by default "auto"."""
    shard: VocabShard | None
    """This rank's shard of the vocabulary: weight and bias are its rows, all other inputs are replicated."""
    kernels: SoftmaxKernels | None
    """Softmax kernels; by default the fastest available."""
    invariant: bool
    """Compute logits with batch-invariant kernels; by default False."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Tokens to score at P positions."""

    ids: Tensor
    """[P] int64: token ids of the whole vocabulary."""
    temperatures: Tensor
    """[P]"""
    kept: KeptTokens | None
    """Kept sets that the tokens were sampled from; None for the whole vocabulary."""

    def of(self, chunk: slice) -> ChunkTargets:
        """Return the targets of a chunk of positions."""
        kept = None if self.kept is None else self.kept.chunk(chunk)
        return ChunkTargets(self.ids[chunk], self.temperatures[chunk], kept)


class ChunkTargets(NamedTuple):
    """Tokens to score at the C positions of a chunk."""

    ids: Tensor
    temperatures: Tensor
    kept: KeptRows | None


class HeadStats(NamedTuple):
    """Statistics of the rows of a chunk, or of all positions."""

    full: RowStats
    """Over the whole vocabulary."""
    drawn: RowStats | None
    """Over the tokens that each target was sampled from: its kept set or the whole vocabulary. None without kept sets.
    """

    def logprobs(self) -> Tensor:
        """Return [C] log-probabilities of the targets among the tokens that they were sampled from."""
        return (self.drawn or self.full).logprobs()

    @staticmethod
    def join(parts: list[HeadStats]) -> HeadStats:
        """Concatenate the rows of the parts."""
        drawn = [part.drawn for part in parts if part.drawn is not None]
        return HeadStats(_join([part.full for part in parts]), _join(drawn) if drawn else None)

    def of(self, chunk: slice) -> HeadStats:
        """Return the rows of a chunk."""
        return HeadStats(_rows(self.full, chunk), None if self.drawn is None else _rows(self.drawn, chunk))


class UpstreamGradients(NamedTuple):
    """Upstream gradients of the scores."""

    logprobs: Tensor
    """[C]"""
    entropy: Tensor | None
    """[C]; None if the entropy is not differentiable."""

    def of(self, chunk: slice) -> UpstreamGradients:
        """Return the rows of a chunk."""
        return UpstreamGradients(self.logprobs[chunk], None if self.entropy is None else self.entropy[chunk])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadOptions:
    """Options that are the same for all chunks."""

    with_entropy: bool
    entropy_grad: bool
    chunk_size: ChunkSize
    shard: VocabShard | None
    kernels: SoftmaxKernels
    invariant: bool

    @classmethod
    def of(
        cls,
        weight: Tensor,
        *,
        with_entropy: bool = True,
        entropy_grad: bool = False,
        chunk_size: ChunkSize = "auto",
        shard: VocabShard | None = None,
        kernels: SoftmaxKernels | None = None,
        invariant: bool = False,
    ) -> HeadOptions:
        """Create options with the kernels for this weight. Raises `ValueError` if ``chunk_size`` is less than 1."""
        if chunk_size != "auto" and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        return cls(
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            chunk_size=chunk_size,
            shard=shard,
            kernels=kernels or kernels_for(weight),
            invariant=invariant,
        )

    @property
    def first(self) -> int:
        """Id of the first token of this rank's shard of the vocabulary."""
        return 0 if self.shard is None else self.shard.first

    def stats(self, logits: Tensor, targets: ChunkTargets) -> HeadStats:
        """Compute the statistics of this rank's logits of a chunk; `combine` extends them to the whole vocabulary."""
        full = self.kernels.stats(
            logits,
            targets.ids,
            targets.temperatures,
            first=self.first,
            with_entropy=self.with_entropy or self.entropy_grad,
        )
        if targets.kept is None:
            return HeadStats(full, None)
        return HeadStats(full, targets.kept.stats(logits, targets.temperatures, first=self.first))

    def combine(self, stats: HeadStats, restricted: Tensor | None) -> HeadStats:
        """Combine the statistics of all ranks' shards; rows that are not ``restricted`` have no kept set."""
        full, drawn = stats
        if self.shard is not None:
            full = self.shard.combine(full)
            drawn = None if drawn is None else self.shard.combine(drawn)
        if drawn is None or restricted is None:
            return HeadStats(full, None)
        tops = torch.where(restricted, drawn.tops, full.tops)
        sums = torch.where(restricted, drawn.sums, full.sums)
        return HeadStats(full, RowStats(tops, sums, full.chosen, None))

    def gradient(self, logits: Tensor, targets: ChunkTargets, stats: HeadStats, up: UpstreamGradients) -> Tensor:
        """Overwrite this rank's logits of a chunk with their gradient; ``stats`` are those of `combine`."""
        ids, temperatures, kept = targets
        full, up_logprobs, values = stats.full, up.logprobs, None
        if kept is not None and stats.drawn is not None:
            # before the logits are overwritten; in the full softmax these rows only get the entropy's gradient
            values = kept.gradient(logits, ids, temperatures, stats.drawn, up_logprobs, first=self.first)
            up_logprobs = up_logprobs.masked_fill(kept.restricted, 0)
        upstream = RowGradients(full.tops, full.sums.log(), up_logprobs, full.entropy, up.entropy)
        grad = self.kernels.gradient(logits, ids, temperatures, upstream, first=self.first)
        if kept is not None and values is not None:
            kept.add(values, grad, first=self.first, sharded=self.shard is not None)
        return grad


def _join(parts: list[RowStats]) -> RowStats:
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return RowStats(
        torch.cat([part.tops for part in parts]),
        torch.cat([part.sums for part in parts]),
        torch.cat([part.chosen for part in parts]),
        torch.cat(entropies) if entropies else None,
    )


def _rows(stats: RowStats, chunk: slice) -> RowStats:
    return RowStats(*(None if part is None else part[chunk] for part in stats))  # type: ignore[arg-type]
