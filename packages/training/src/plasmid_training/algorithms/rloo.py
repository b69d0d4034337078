"""REINFORCE with the reward of other answers to the prompt as its baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from plasmid.components import Needs, Reduction

from .parts.group import leave_one_out_advantages
from .parts.policy_gradient import RewardPolicyGradient
from .parts.policy_loss import PolicyLoss, RatioClip, token_ratio

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
    from torch import Tensor


class RLOO(RatioClip, RewardPolicyGradient):
    """Rewards less the mean reward of the prompt's other rollouts.

    Formula: A = r - mean of the other rollouts' r, with r = reward - reward_kl_coef KL; token loss -w A, clipped like
    PPO's once several steps are taken on a batch.
    Paper: Ahmadian et al. 2024, arXiv 2402.14740
    Use: few samples of each prompt: the baseline is unbiased, and no standard deviation has to be estimated.
    """

    kind: Literal["rloo"] = "rloo"
    reduction: Reduction = "per-token"
    """How token losses of a step are averaged: all tokens alike, which is the paper's sum but for a factor."""

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        return inputs.spread(leave_one_out_advantages(self.table(inputs)))

    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        return self.clipped_loss(token_ratio(inputs, old_logprobs), inputs.advantages)


class ReMax(RatioClip, RewardPolicyGradient):
    """Rewards less that of the policy's greedy answer to the same prompt, which one more rollout gives.

    Formula: A = r(sampled) - r(greedy), with r(sampled) = reward - reward_kl_coef KL; token loss -w A, clipped like
    PPO's once several steps are taken on a batch.
    Paper: Li et al. 2023, arXiv 2310.10505
    Use: one sample of each prompt, no critic; costs one greedy rollout of each prompt.
    """

    kind: Literal["remax"] = "remax"
    reduction: Reduction = "per-token"
    """How token losses of a step are averaged: all tokens alike, which is the paper's sum but for a factor."""

    def needs(self) -> Needs:
        return replace(super().needs(), greedy_baseline=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        table = self.table(inputs)
        if table.baselines is None:
            raise ValueError("the batch has no greedy rollouts; remax needs one of each prompt")
        return inputs.spread(table.rewards - table.baselines)

    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        return self.clipped_loss(token_ratio(inputs, old_logprobs), inputs.advantages)
