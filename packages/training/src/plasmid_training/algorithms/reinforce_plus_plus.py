"""REINFORCE with PPO's clip and advantages normalized over the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from plasmid.components import Reduction
from pydantic import Field

from .grpo import RatioClip, group_advantages
from .parts.group import GroupPolicyGradient
from .parts.policy_gradient import RewardPolicyGradient
from .parts.returns import discounted_sums, token_rewards, whiten

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from plasmid.components.objective_inputs import AdvantageInputs
    from plasmid.types.batch import BatchTable
    from torch import Tensor


class ReinforcePlusPlus(RatioClip, RewardPolicyGradient):
    """Per-token returns, normalized over all tokens of the batch; no critic, no prompt groups.

    Formula: G_t = sum over k >= t of gamma^(k - t) (r_k - reward_kl_coef KL_k), where r_k is the reward on the last
    token and 0 before; A = (G - mean) / sqrt(var + 1e-8) over the batch; PPO's clipped token loss.
    Paper: Hu et al. 2025, arXiv 2501.03262
    Use: one sample per prompt, many prompts.
    """

    kind: Literal["reinforce-plus-plus"] = "reinforce-plus-plus"
    reduction: Reduction = "per-token"
    """How the token losses of an optimizer step are averaged; REINFORCE++ weighs all tokens equally."""
    gamma: float = Field(1.0, gt=0.0, le=1.0)
    """Discount factor per token."""

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        rewards = token_rewards(inputs, self.penalty(inputs))
        return whiten(discounted_sums(rewards, inputs.sample_index, self.gamma), inputs)


class ReinforcePlusPlusBaseline(GroupPolicyGradient, RatioClip, RewardPolicyGradient):
    """Rewards minus the mean of their prompt group, normalized over all tokens of the batch.

    Formula: B = r - mean over the rollouts of the prompt, with r = reward - reward_kl_coef KL;
    A = (B - mean) / sqrt(var + 1e-8) over the batch's tokens; PPO's clipped token loss.
    Paper: Hu et al. 2025, arXiv 2501.03262
    Use: like GRPO, but without dividing by the standard deviation of small groups.
    """

    kind: Literal["reinforce-plus-plus-baseline"] = "reinforce-plus-plus-baseline"
    reduction: Reduction = "per-token"
    """How the token losses of an optimizer step are averaged; REINFORCE++ weighs all tokens equally."""

    def compare(self, table: BatchTable) -> NDArray[np.float64]:
        return group_advantages(table, normalize_std=False)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        return whiten(super().policy_advantages(inputs), inputs)
