"""Group relative policy optimization."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from plasmid.components import Needs

from .parts.group import GroupNormalization
from .parts.policy_gradient import RewardPolicyGradient
from .parts.policy_loss import PolicyLoss, RatioClip, token_ratio, tokenwise

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
    from torch import Tensor


class GRPO(GroupNormalization, RatioClip, RewardPolicyGradient):
    """Rewards relative to their prompt group, PPO's clipped loss, and a KL to the reference model in the loss.

    Formula: A = (r - mean) / (std + std_eps) over the rollouts of the prompt; token loss
    max(-w A, -clip(w, 1 - clip_low, 1 + clip_high) A) with w = p / p_old; plus kl_coef KL(p || p_ref).
    Paper: Shao et al. 2024, arXiv 2402.03300
    Use: the default for verifiable rewards; needs several samples per prompt, no critic.
    """

    kind: Literal["grpo"] = "grpo"

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Return A = (r - mean) / (std + std_eps) over the prompt's rollouts, the same for all tokens of a sample."""
        return self.relative_rewards(inputs, self.table(inputs))

    @tokenwise
    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        """Return max(-w A, -clip(w, 1 - clip_low, 1 + clip_high) A) with w = p / p_old."""
        return self.clipped_loss(token_ratio(inputs, old_logprobs), inputs.advantages)
