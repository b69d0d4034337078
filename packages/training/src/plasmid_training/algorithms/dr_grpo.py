"""GRPO done right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from plasmid.components import Needs
from pydantic import Field

from .parts.group import group_advantages
from .parts.policy_gradient import RewardPolicyGradient
from .parts.policy_loss import PolicyLoss, RatioClip, token_ratio

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
    from torch import Tensor


class DrGRPO(RatioClip, RewardPolicyGradient):
    """GRPO without its biases: no standard deviation, and one divisor for answers of every length.

    Formula: A = r - mean over the rollouts of the prompt; GRPO's token loss, summed and divided by
    constant_length x rollouts.
    Paper: Liu et al. 2025, arXiv 2503.20783
    Use: when answers grow longer without growing better, or when hard and easy prompts should not weigh more.
    """

    kind: Literal["dr-grpo"] = "dr-grpo"
    reduction: Literal["constant"] = "constant"
    """How token losses of a step are averaged: their sum is divided by constant_length times the rollouts."""
    constant_length: int = Field(ge=1)
    """Tokens that the loss of a rollout is divided by, for example the longest completion."""

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        return inputs.spread(group_advantages(self.table(inputs), normalize_std=False))

    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        return self.clipped_loss(token_ratio(inputs, old_logprobs), inputs.advantages)
