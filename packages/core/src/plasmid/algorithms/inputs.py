"""What algorithms are handed, and what they hand back. T is the number of tokens, N of samples of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..batch import BatchTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """Everything one rank holds of a batch, when advantages are computed (once per batch, before the first step)."""

    table: BatchTable
    """All N samples of the batch; the same on every rank."""
    sample_index: Tensor
    """[T] int64: row of the table that each of this rank's tokens belongs to."""
    mask: Tensor
    """[T] bool: the loss mask."""
    rollout_logprobs: Tensor
    """[T]"""
    old_logprobs: Tensor | None
    """[T] the policy's before the first step, if `Role.POLICY` was scored."""
    ref_logprobs: Tensor | None
    """[T] if `Role.REFERENCE` was scored."""
    teacher_logprobs: Tensor | None
    values: Tensor | None
    """[T] the critic's, if `Role.CRITIC` was scored."""
    all_reduce: Callable[[Tensor], Tensor]
    """Sum of a tensor over all ranks that hold different tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One microbatch. Per-token arrays hold every token of whole samples, also those that the mask leaves out."""

    sample_index: Tensor
    """[T] int64: 0..n-1, which sample of this microbatch a token belongs to."""
    mask: Tensor
    """[T] bool."""
    logprobs: Tensor
    """[T] the policy's now; carries the gradient."""
    entropy: Tensor | None
    """[T] of the next-token distribution at the sample's temperature."""
    old_logprobs: Tensor | None
    """[T] None if they equal ``logprobs`` now (one step per batch): use ``logprobs.detach()``."""
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None
    teacher_logprobs: Tensor | None
    advantages: Tensor
    """[T]"""

    def per_sample_sum(self, values: Tensor) -> Tensor:
        """[n] sums of the masked values of each sample; differentiable."""
        n = int(self.sample_index.max()) + 1 if self.sample_index.numel() else 0
        return values.new_zeros(n).index_add(0, self.sample_index, values * self.mask)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """Loss of one microbatch before reduction."""

    loss: Tensor
    """[T] per token; the trainer sums it with weights that make the whole step's reduction (`reduction.py`)."""
    metrics: Mapping[str, Tensor]
    """[T] each: averaged over the masked tokens of the step and reported as ``train/<name>``."""
