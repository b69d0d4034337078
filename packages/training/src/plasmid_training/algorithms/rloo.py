"""REINFORCE with the rewards of other answers to the same prompt as the baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from plasmid.components import Needs, Reduction

from .grpo import RatioClip
from .parts.group import GroupPolicyGradient, leave_one_out_advantages
from .parts.policy_gradient import RewardPolicyGradient

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from plasmid.components.objective_inputs import AdvantageInputs
    from plasmid.types.batch import BatchTable
    from torch import Tensor


class RLOO(GroupPolicyGradient, RatioClip, RewardPolicyGradient):
    """Rewards minus the mean reward of the prompt's other rollouts.

    Formula: A = r - mean of the other rollouts' r, with r = reward - reward_kl_coef KL; token loss -w A, clipped like
    PPO's once several steps are taken on a batch.
    Paper: Ahmadian et al. 2024, arXiv 2402.14740
    Use: few samples per prompt: the baseline is unbiased, and no standard deviation has to be estimated.
    """

    kind: Literal["rloo"] = "rloo"
    reduction: Reduction = "per-token"
    """How the token losses of an optimizer step are averaged; ``per-token`` is the paper's sum up to a constant
    factor."""

    def compare(self, table: BatchTable) -> NDArray[np.float64]:
        return leave_one_out_advantages(table)


class ReMax(RatioClip, RewardPolicyGradient):
    """Rewards minus the reward of the policy's greedy answer to the same prompt, sampled in one extra rollout.

    Formula: A = r(sampled) - r(greedy), with r(sampled) = reward - reward_kl_coef KL; token loss -w A, clipped like
    PPO's once several steps are taken on a batch.
    Paper: Li et al. 2023, arXiv 2310.10505
    Use: one sample per prompt, no critic; costs one greedy rollout per prompt.
    """

    kind: Literal["remax"] = "remax"
    reduction: Reduction = "per-token"
    """How the token losses of an optimizer step are averaged; ``per-token`` is the paper's sum up to a constant
    factor."""

    def needs(self) -> Needs:
        return replace(super().needs(), greedy_baseline=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        table = self.table(inputs)
        if table.baselines is None:
            raise ValueError("the batch has no greedy rollouts; remax needs one per prompt")
        return inputs.spread(table.rewards - table.baselines)
