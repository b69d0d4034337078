"""Inputs and outputs of algorithms. T is the number of loss tokens; tokens outside the loss mask are left out."""

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
"""[N] `Sample.metadata` of each row of the table, as JSON types."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """One rank's part of a batch when advantages are computed: once per batch, before the first step.

    Tokens are ordered by sample. A rank without tokens (T = 0) must still take part in every `all_reduce`.
    """

    table: BatchTable
    """All N samples of the batch; the same on every rank."""
    sample_index: Tensor
    """[T] int64: row of the table that each of this rank's tokens belongs to."""
    token_ids: Tensor
    """[T] int64: the tokens."""
    versions: Tensor
    """[T] int64: policy version that sampled each token; -1 for demonstrations."""
    rollout_logprobs: Tensor
    """[T] log-probabilities by the policy that sampled the tokens. If top-p, top-k or min-p restricted sampling and the
    engine reported the remaining tokens, these and all other log-probabilities are normalized over those tokens."""
    old_logprobs: Tensor | None
    """[T] log-probabilities by the policy before the first step, if `Role.POLICY` was scored."""
    ref_logprobs: Tensor | None
    """[T] if `Role.REFERENCE` was scored."""
    teacher_logprobs: Tensor | None
    """[T] if `Role.TEACHER` was scored."""
    values: Tensor | None
    """[T] predictions of the critic, if `Role.CRITIC` was scored."""
    all_reduce: Callable[[Tensor], Tensor]
    """Sums a tensor over all ranks that hold different tokens."""
    read_metadata: Callable[[], Metadata]
    """Returns `metadata`."""
    read_kept: Callable[[], KeptTokens | None]
    """Returns `kept`."""
    token_rewards: Tensor | None = None
    """[T] rewards earned at a token before the end of its sample, 0 elsewhere; parts of the sample's reward. None if no
    sample of the batch has any."""
    turn_index: Tensor | None = None
    """[T] int64: turn of its sample that each token belongs to, a column of ``table.turn_rewards``; None without
    `token_rewards`."""

    @property
    def metadata(self) -> Metadata:
        """[N] `Sample.metadata` of each row of the table. Fetched when it is read; needs `Needs.metadata`."""
        return self.read_metadata()

    @property
    def kept(self) -> KeptTokens | None:
        """[T] candidates that top-p, top-k and min-p left for each token; None if sampling was unrestricted.

        Computed on access.
        """
        return self.read_kept()

    def spread(self, values: Tensor | NDArray[np.float64]) -> Tensor:
        """[T] the value of each token's sample, from values [N]; in the dtype and on the device of the tokens."""
        import torch

        return torch.as_tensor(values).to(self.rollout_logprobs)[self.sample_index]

    def per_sample_sum(self, values: Tensor) -> Tensor:
        """Sum values [T] over the tokens of each sample, across all ranks. Returns [N] float64."""
        values = values.double()
        sums = values.new_zeros(self.table.num_samples).index_add(0, self.sample_index, values)
        return self.all_reduce(sums)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One microbatch of n whole samples; T may be 0."""

    num_samples: int
    """n; 1 for a microbatch without any sample."""
    sample_index: Tensor
    """[T] int64: the sample of this microbatch that each token belongs to, 0..n-1."""
    table: BatchTable
    """All N samples of the batch, as in `AdvantageInputs`."""
    table_index: Tensor
    """[T] int64: row of the table that each token belongs to."""
    token_ids: Tensor
    """[T] int64: the tokens."""
    versions: Tensor
    """[T] int64: policy version that sampled each token; -1 for demonstrations."""
    logprobs: Tensor
    """[T] log-probabilities by the current policy; differentiable."""
    entropy: Tensor | None
    """[T] entropy of the next-token distribution at the sample's temperature; None if the trainer lacks it."""
    old_logprobs: Tensor | None
    """[T] as in `AdvantageInputs`; None if equal to ``logprobs`` (one step per batch): use ``logprobs.detach()``."""
    rollout_logprobs: Tensor
    """[T] as in `AdvantageInputs`."""
    ref_logprobs: Tensor | None
    """[T] if `Role.REFERENCE` was scored."""
    teacher_logprobs: Tensor | None
    """[T] if `Role.TEACHER` was scored."""
    advantages: Tensor
    """[T] result of `Algorithm.advantages`."""
    top_logprobs: Tensor | None = None
    """[T, K] log-probabilities by the current policy of the teacher's top tokens, over the whole vocabulary at the
    sample's temperature; differentiable. None without `Needs.teacher_top_k`."""
    teacher_top_logprobs: Tensor | None = None
    """[T, K] log-probabilities of the same tokens by the teacher."""
    kept: KeptTokens | None
    """[T] candidates that top-p, top-k and min-p left for each token; None if sampling was unrestricted."""
    read_metadata: Callable[[], Metadata]
    """Returns `metadata`."""

    @property
    def metadata(self) -> Metadata:
        """[N] `Sample.metadata` of each row of the table. Fetched when it is read; needs `Needs.metadata`."""
        return self.read_metadata()

    def spread(self, values: Tensor | NDArray[np.float64]) -> Tensor:
        """[T] the value of each token's sample, from values [N]; in the dtype and on the device of the tokens."""
        import torch

        return torch.as_tensor(values).to(self.rollout_logprobs)[self.table_index]

    def per_sample_sum(self, values: Tensor) -> Tensor:
        """Sum values [T] over the tokens of each sample. Returns [n]; differentiable."""
        return values.new_zeros(self.num_samples).index_add(0, self.sample_index, values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueInputs:
    """One microbatch of the critic; T may be 0."""

    values: Tensor
    """[T] predictions of the current critic; differentiable. A token's value is that of the text before it."""
    old_values: Tensor
    """[T] predictions of the critic before the first step."""
    returns: Tensor
    """[T] result of `ActorCritic.returns`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """Loss of one microbatch before reduction."""

    loss: Tensor
    """[T] loss per token; the trainer sums it with weights that implement the step's reduction (`sample_weights`)."""
    metrics: Mapping[str, Tensor]
    """[T] each; averaged over the loss tokens of the step and reported as ``train/<name>``."""
