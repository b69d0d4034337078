"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ..components import Needs, Reduction
from .clipped import Clipped
from .rewarded import Rewarded

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import AdvantageInputs


class RLOO(Rewarded, Clipped):
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
        import torch

        from .group import leave_one_out_advantages

        return inputs.spread(torch.from_numpy(leave_one_out_advantages(self.table(inputs))))
