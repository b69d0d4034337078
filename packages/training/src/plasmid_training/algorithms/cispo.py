"""Clipped importance sampling policy optimization."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from plasmid.components import Needs, Reduction
from pydantic import Field

from .parts.group import GroupNormalization
from .parts.policy_gradient import RewardPolicyGradient
from .parts.policy_loss import PolicyLoss, weighted_likelihood_loss

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
    from torch import Tensor


class CISPO(GroupNormalization, RewardPolicyGradient):
    """REINFORCE weighted by the clipped probability ratio: the weight is bounded, and no token loses its gradient.

    Formula: A as in GRPO; token loss -sg(clip(w, 1 - clip_low, 1 + clip_high)) A log p with w = p / p_old, where sg
    stops the gradient.
    Paper: MiniMax 2025, arXiv 2506.13585
    Use: several steps on a batch, or stale samples, where PPO's clip would silence rare but decisive tokens.
    """

    kind: Literal["cispo"] = "cispo"
    reduction: Reduction = "per-token"
    """How token losses of a step are averaged: all tokens alike in CISPO."""
    clip_low: float = Field(1.0, ge=0.0, le=1.0)
    """The weight is at least 1 - clip_low."""
    clip_high: float = Field(4.0, ge=0.0, allow_inf_nan=False)
    """The weight is at most 1 + clip_high."""

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        return inputs.spread(self.normalize(self.table(inputs)))

    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        return weighted_likelihood_loss(
            inputs.logprobs, old_logprobs, inputs.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
