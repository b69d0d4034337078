"""Options and statistics of a linear head: kept sets or the whole vocabulary, on one rank or sharded.

P positions, C positions of a chunk, V vocabulary size (of this rank's shard).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from plasmid.types.top_tokens import TopChoice
from plasmid_models.kernels.softmax_rows import RowGradients, RowStats, SoftmaxKernels, kernels_for
from torch import Tensor

from .kept_tokens import KeptRows, KeptTokens
from .linear_head import ChunkSize
from .top_tokens import TopStats
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
    top: TopChoice | None
    """Top tokens to choose and score, without a gradient; by default None."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Tokens to score at P positions."""

    ids: Tensor
    """[P] int64: token ids of the whole vocabulary."""
    temperatures: Tensor
    """[P]"""
    kept: KeptTokens | None
    """Kept sets that the tokens were sampled from; None for the whole vocabulary."""
    top_ids: Tensor | None = None
    """[P, K] int: further tokens to score at each position, over the whole vocabulary; distinct at a position."""

    def of(self, chunk: slice) -> ChunkTargets:
        """Return the targets of a chunk of positions."""
        kept = None if self.kept is None else self.kept.chunk(chunk)
        top_ids = None if self.top_ids is None else self.top_ids[chunk].long()
        return ChunkTargets(self.ids[chunk], self.temperatures[chunk], kept, top_ids)


class ChunkTargets(NamedTuple):
    """Tokens to score at the C positions of a chunk."""

    ids: Tensor
    temperatures: Tensor
    kept: KeptRows | None
    top_ids: Tensor | None


class HeadStats(NamedTuple):
    """Statistics of the rows of a chunk, or of all positions."""

    full: RowStats
    """Over the whole vocabulary."""
    drawn: RowStats | None
    """Over the tokens that each target was sampled from: its kept set or the whole vocabulary. None without kept sets.
    """
    top: TopStats | None = None
    """Of further tokens, given or chosen; None without any."""

    def logprobs(self) -> Tensor:
        """Return log-probabilities [C] of the targets among the tokens that they were sampled from."""
        return (self.drawn or self.full).logprobs()

    def top_logprobs(self) -> Tensor | None:
        """Return log-probabilities [C, K] of the further tokens over the whole vocabulary."""
        return None if self.top is None else self.top.logprobs(self.full)

    @staticmethod
    def join(parts: list[HeadStats]) -> HeadStats:
        """Concatenate the rows of the parts."""
        drawn = [part.drawn for part in parts if part.drawn is not None]
        tops = [part.top for part in parts if part.top is not None]
        top = TopStats(*map(torch.cat, zip(*tops, strict=True))) if tops else None
        return HeadStats(_join([part.full for part in parts]), _join(drawn) if drawn else None, top)

    def of(self, chunk: slice) -> HeadStats:
        """Return the rows of a chunk."""
        drawn = None if self.drawn is None else _rows(self.drawn, chunk)
        top = None if self.top is None else TopStats(self.top.ids[chunk], self.top.z[chunk])
        return HeadStats(_rows(self.full, chunk), drawn, top)


class UpstreamGradients(NamedTuple):
    """Upstream gradients of the scores."""

    logprobs: Tensor
    """[C]"""
    entropy: Tensor | None
    """[C]; None if the entropy is not differentiable."""
    top: Tensor | None
    """[C, K]; None without further tokens."""

    def of(self, chunk: slice) -> UpstreamGradients:
        """Return the rows of a chunk."""
        return UpstreamGradients(*(None if part is None else part[chunk] for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadOptions:
    """Options that are the same for all chunks."""

    with_entropy: bool
    entropy_grad: bool
    chunk_size: ChunkSize
    shard: VocabShard | None
    kernels: SoftmaxKernels
    invariant: bool
    top: TopChoice | None

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
        top: TopChoice | None = None,
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
            top=top,
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
        kept, top = targets.kept, None
        if self.top is not None:
            top = TopStats.choose(logits, self.top, targets.temperatures, first=self.first)
        elif targets.top_ids is not None:
            top = TopStats.of(logits, targets.top_ids, targets.temperatures, first=self.first)
        drawn = None if kept is None else kept.stats(logits, targets.temperatures, first=self.first)
        return HeadStats(full, drawn, top)

    def combine(self, stats: HeadStats, restricted: Tensor | None) -> HeadStats:
        """Combine the statistics of all ranks' shards; rows that are not ``restricted`` have no kept set."""
        full, drawn, top = stats
        if self.shard is not None:
            full = self.shard.combine(full)
            drawn = None if drawn is None else self.shard.combine(drawn)
            top = None if top is None else top.combine(self.shard, chosen=self.top is not None)
        if drawn is None or restricted is None:
            return HeadStats(full, None, top)
        tops = torch.where(restricted, drawn.tops, full.tops)
        sums = torch.where(restricted, drawn.sums, full.sums)
        return HeadStats(full, RowStats(tops, sums, full.chosen, None), top)

    def gradient(self, logits: Tensor, targets: ChunkTargets, stats: HeadStats, up: UpstreamGradients) -> Tensor:
        """Overwrite this rank's logits of a chunk with their gradient; ``stats`` are those of `combine`."""
        ids, temperatures, kept, _ = targets
        full, up_logprobs, values, sharded = stats.full, up.logprobs, None, self.shard is not None
        if kept is not None and stats.drawn is not None:
            # before the logits are overwritten; in the full softmax these rows only get the entropy's gradient
            values = kept.gradient(logits, ids, temperatures, stats.drawn, up_logprobs, first=self.first)
            up_logprobs = up_logprobs.masked_fill(kept.restricted, 0)
        total = up_logprobs if up.top is None else up_logprobs + up.top.sum(1)
        upstream = RowGradients(full.tops, full.sums.log(), total, full.entropy, up.entropy)
        grad = self.kernels.gradient(logits, ids, temperatures, upstream, first=self.first)
        if stats.top is not None and up.top is not None:
            rest = (ids, temperatures, full, upstream, up_logprobs, up.top)
            stats.top.write_gradient(grad, *rest, first=self.first, sharded=sharded)
        if kept is not None and values is not None:
            kept.add(values, grad, first=self.first, sharded=sharded)
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
