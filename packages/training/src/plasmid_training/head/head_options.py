"""How the rows of a linear head are scored: within a part of the vocabulary or all of it, on one rank or several.

P positions, C positions of a chunk, V vocabulary size (of this rank's part).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from .kept_tokens import KeptRows, KeptTokens
from .linear_head import ChunkSize
from .softmax_rows import RowGradients, RowStats, SoftmaxKernels, kernels_for
from .vocab_shard import VocabShard


class HeadSettings(TypedDict, total=False):
    """What callers may choose."""

    with_entropy: bool
    """Compute the entropy; by default True."""
    entropy_grad: bool
    """Let the entropy carry a gradient; by default False."""
    chunk_size: ChunkSize
    """Positions whose logits exist at one time; by default "auto"."""
    shard: VocabShard | None
    """This rank's part of the vocabulary: weight and bias are its rows, all else is the same on all ranks."""
    kernels: SoftmaxKernels | None
    """By default the fastest there are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """What is scored at each of P positions."""

    ids: Tensor
    """[P] int64: tokens of the whole vocabulary."""
    temperatures: Tensor
    """[P]"""
    kept: KeptTokens | None
    """What they were drawn from; None for the whole vocabulary."""

    def of(self, chunk: slice) -> ChunkTargets:
        """Those of some positions."""
        kept = None if self.kept is None else self.kept.chunk(chunk)
        return ChunkTargets(self.ids[chunk], self.temperatures[chunk], kept)


class ChunkTargets(NamedTuple):
    """What is scored at each of C positions."""

    ids: Tensor
    temperatures: Tensor
    kept: KeptRows | None


class HeadStats(NamedTuple):
    """Of the rows of a chunk, or of all positions."""

    full: RowStats
    """Of the whole vocabulary."""
    drawn: RowStats | None
    """Of what the targets were drawn from: their kept set, or the whole vocabulary. None if no row has a set."""

    def logprobs(self) -> Tensor:
        """[C] of the targets among what they were drawn from."""
        return (self.drawn or self.full).logprobs()

    @staticmethod
    def join(parts: list[HeadStats]) -> HeadStats:
        """All rows of the parts."""
        drawn = [part.drawn for part in parts if part.drawn is not None]
        return HeadStats(_joined([part.full for part in parts]), _joined(drawn) if drawn else None)

    def of(self, chunk: slice) -> HeadStats:
        """Some of the rows."""
        return HeadStats(_rows(self.full, chunk), None if self.drawn is None else _rows(self.drawn, chunk))


class Upstream(NamedTuple):
    """Gradients that come back to the scores."""

    logprobs: Tensor
    """[C]"""
    entropy: Tensor | None
    """[C] None if the entropy carries none."""

    def of(self, chunk: slice) -> Upstream:
        """Some of the rows."""
        return Upstream(self.logprobs[chunk], None if self.entropy is None else self.entropy[chunk])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadOptions:
    """What does not change from chunk to chunk."""

    with_entropy: bool
    entropy_grad: bool
    chunk_size: ChunkSize
    shard: VocabShard | None
    kernels: SoftmaxKernels

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
    ) -> HeadOptions:
        """With the kernels for this weight. Raises `ValueError` for a chunk size that is none."""
        if chunk_size != "auto" and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        return cls(
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            chunk_size=chunk_size,
            shard=shard,
            kernels=kernels or kernels_for(weight),
        )

    @property
    def first(self) -> int:
        """Id of the first token that this rank has logits of."""
        return 0 if self.shard is None else self.shard.first

    def stats(self, logits: Tensor, targets: ChunkTargets) -> HeadStats:
        """Of this rank's logits of a chunk; `combine` makes them those of the whole vocabulary."""
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
        """Of all ranks' parts of the vocabulary; rows that are not ``restricted`` were drawn from all of it."""
        full, drawn = stats
        if self.shard is not None:
            full = self.shard.combine(full)
            drawn = None if drawn is None else self.shard.combine(drawn)
        if drawn is None or restricted is None:
            return HeadStats(full, None)
        tops = torch.where(restricted, drawn.tops, full.tops)
        sums = torch.where(restricted, drawn.sums, full.sums)
        return HeadStats(full, RowStats(tops, sums, full.chosen, None))

    def gradient(self, logits: Tensor, targets: ChunkTargets, stats: HeadStats, up: Upstream) -> Tensor:
        """Gradient of this rank's logits of a chunk, in their place; ``stats`` as `combine` gave them."""
        ids, temperatures, kept = targets
        full, up_logprobs, values = stats.full, up.logprobs, None
        if kept is not None and stats.drawn is not None:
            # before the logits are overwritten; through the whole softmax these rows get the entropy's gradient alone
            values = kept.gradient(logits, ids, temperatures, stats.drawn, up_logprobs, first=self.first)
            up_logprobs = up_logprobs.masked_fill(kept.restricted, 0)
        upstream = RowGradients(full.tops, full.sums.log(), up_logprobs, full.entropy, up.entropy)
        grad = self.kernels.gradient(logits, ids, temperatures, upstream, first=self.first)
        if kept is not None and values is not None:
            kept.add(values, grad, first=self.first, sharded=self.shard is not None)
        return grad


def _joined(parts: list[RowStats]) -> RowStats:
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return RowStats(
        torch.cat([part.tops for part in parts]),
        torch.cat([part.sums for part in parts]),
        torch.cat([part.chosen for part in parts]),
        torch.cat(entropies) if entropies else None,
    )


def _rows(stats: RowStats, chunk: slice) -> RowStats:
    return RowStats(*(None if part is None else part[chunk] for part in stats))  # type: ignore[arg-type]
