"""REINFORCE with the greedy answer as its baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ..components import Needs, Reduction
from .clipped import Clipped
from .rewarded import Rewarded

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import AdvantageInputs


class ReMax(Rewarded, Clipped):
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
        import torch

        table = self.table(inputs)
        if table.baselines is None:
            raise ValueError("the batch has no greedy rollouts; remax needs one of each prompt")
        return inputs.spread(torch.from_numpy(table.rewards - table.baselines))
