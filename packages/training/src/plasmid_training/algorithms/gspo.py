"""Group sequence policy optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from .grpo import GroupNormalization, clipped_ratio_loss
from .parts.policy_loss import PolicyLoss, exp_difference

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import LossInputs
    from torch import Tensor


class GSPO(GroupNormalization):
    """GRPO with one probability ratio per sample instead of one per token.

    Formula: A as in GRPO; s = exp(mean over the sample's tokens of log p - log p_old); loss
    max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A).
    Paper: Zheng et al. 2025, arXiv 2507.18071
    Use: mixture-of-experts models and long answers, where the ratios of single tokens are noisy.
    """

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0.0, le=1.0)
    """Lower bound of the sequence ratio: 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0.0, allow_inf_nan=False)
    """Upper bound of the sequence ratio: 1 + clip_high."""

    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        difference = inputs.logprobs - old_logprobs
        counts = inputs.per_sample_sum(difference.new_ones(difference.shape)).clamp(min=1)
        ratio = exp_difference(inputs.per_sample_sum(difference) / counts)[inputs.sample_index]
        return clipped_ratio_loss(ratio, inputs.advantages, clip_low=self.clip_low, clip_high=self.clip_high)
