"""What algorithms are handed, and what they hand back. T counts tokens that the loss sees; others are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..types.batch import BatchTable

if TYPE_CHECKING:
    from plasmid_training.head.kept_tokens import KeptTokens
    from torch import Tensor

Metadata = tuple[Mapping[str, Any], ...]
"""[N] what workflows left in `Sample.metadata`, by row of the table; JSON types only."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """Everything one rank holds of a batch, when advantages are computed (once per batch, before the first step).

    Tokens come sample after sample, in order. A rank may hold none (T = 0) and still takes part in every `all_reduce`.
    """

    table: BatchTable
    """All N samples of the batch; the same on every rank."""
    sample_index: Tensor
    """[T] int64: row of the table that each of this rank's tokens belongs to."""
    token_ids: Tensor
    """[T] int64: the tokens."""
    versions: Tensor
    """[T] int64: policy version that drew each token; -1 where none did (demonstrations)."""
    rollout_logprobs: Tensor
    """[T] of what drew the tokens. Where sampling was restricted and the engine told what it left to draw from, this
    and all other log-probabilities are those within that set."""
    old_logprobs: Tensor | None
    """[T] the policy's before the first step, if `Role.POLICY` was scored."""
    ref_logprobs: Tensor | None
    """[T] if `Role.REFERENCE` was scored."""
    teacher_logprobs: Tensor | None
    """[T] if `Role.TEACHER` was scored."""
    values: Tensor | None
    """[T] the critic's, if `Role.CRITIC` was scored."""
    all_reduce: Callable[[Tensor], Tensor]
    """Sum of a tensor over all ranks that hold different tokens."""
    read_metadata: Callable[[], Metadata]
    """Gives `metadata`."""
    read_kept: Callable[[], KeptTokens | None]
    """Gives `kept`."""

    @property
    def metadata(self) -> Metadata:
        """[N] `Sample.metadata` of each row of the table. Fetched when it is read; needs `Needs.metadata`."""
        return self.read_metadata()

    @property
    def kept(self) -> KeptTokens | None:
        """[T] what top-p, top-k and min-p left to draw each token from; None if nothing was restricted.

        Collected when it is read.
        """
        return self.read_kept()

    def spread(self, values: Tensor | NDArray[np.float64]) -> Tensor:
        """[T] the value of each token's sample, out of [N]; in the dtype and on the device of the tokens."""
        import torch

        return torch.as_tensor(values).to(self.rollout_logprobs)[self.sample_index]

    def per_sample_sum(self, values: Tensor) -> Tensor:
        """[N] float64 sums of values [T] over the tokens of each sample, of all ranks."""
        values = values.double()
        sums = values.new_zeros(self.table.num_samples).index_add(0, self.sample_index, values)
        return self.all_reduce(sums)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One microbatch of n whole samples; T may be 0."""

    num_samples: int
    """n; 1 for a microbatch without any sample."""
    sample_index: Tensor
    """[T] int64: 0..n-1, which sample of this microbatch a token belongs to."""
    table: BatchTable
    """All N samples of the batch, as in `AdvantageInputs`."""
    table_index: Tensor
    """[T] int64: row of the table that each token belongs to."""
    token_ids: Tensor
    """[T] int64: the tokens."""
    versions: Tensor
    """[T] int64: policy version that drew each token; -1 where none did (demonstrations)."""
    logprobs: Tensor
    """[T] the policy's now; carries the gradient."""
    entropy: Tensor | None
    """[T] of the next-token distribution at the sample's temperature; None if the trainer does not compute it."""
    old_logprobs: Tensor | None
    """[T] None if they equal ``logprobs`` now (one step per batch): use ``logprobs.detach()``."""
    rollout_logprobs: Tensor
    """[T] as in `AdvantageInputs`."""
    ref_logprobs: Tensor | None
    """[T] if `Role.REFERENCE` was scored."""
    teacher_logprobs: Tensor | None
    """[T] if `Role.TEACHER` was scored."""
    advantages: Tensor
    """[T] what `Algorithm.advantages` gave."""
    kept: KeptTokens | None
    """[T] what top-p, top-k and min-p left to draw each token from; None if nothing was restricted."""
    read_metadata: Callable[[], Metadata]
    """Gives `metadata`."""

    @property
    def metadata(self) -> Metadata:
        """[N] `Sample.metadata` of each row of the table. Fetched when it is read; needs `Needs.metadata`."""
        return self.read_metadata()

    def spread(self, values: Tensor | NDArray[np.float64]) -> Tensor:
        """[T] the value of each token's sample, out of [N]; in the dtype and on the device of the tokens."""
        import torch

        return torch.as_tensor(values).to(self.rollout_logprobs)[self.table_index]

    def per_sample_sum(self, values: Tensor) -> Tensor:
        """[n] sums of the values of each sample; differentiable."""
        return values.new_zeros(self.num_samples).index_add(0, self.sample_index, values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueInputs:
    """One microbatch of the critic; T may be 0."""

    values: Tensor
    """[T] the critic's now; carries the gradient. A token's value is that of the text before it."""
    old_values: Tensor
    """[T] the critic's before the first step."""
    returns: Tensor
    """[T] what `ActorCritic.returns` gave."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """Loss of one microbatch before reduction."""

    loss: Tensor
    """[T] per token; the trainer sums it with weights that make the whole step's reduction (`sample_weights`)."""
    metrics: Mapping[str, Tensor]
    """[T] each: averaged over the loss tokens of the step and reported as ``train/<name>``."""
