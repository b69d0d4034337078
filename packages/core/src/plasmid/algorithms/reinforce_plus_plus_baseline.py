"""REINFORCE++ with the mean of the prompt group as its baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ..components import Needs, Reduction
from .clipped import Clipped
from .rewarded import Rewarded

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import AdvantageInputs


class ReinforcePlusPlusBaseline(Rewarded, Clipped):
    """Rewards relative to the mean of their prompt group, normalised over all tokens of the batch.

    Formula: B = r - mean over the rollouts of the prompt, with r = reward - reward_kl_coef KL;
    A = (B - mean) / sqrt(var + 1e-8) over the batch's tokens; PPO's clipped token loss.
    Paper: Hu et al. 2025, arXiv 2501.03262
    Use: like GRPO, without its division by the standard deviation of small groups.
    """

    kind: Literal["reinforce-plus-plus-baseline"] = "reinforce-plus-plus-baseline"
    reduction: Reduction = "per-token"
    """How token losses of a step are averaged: all tokens alike in REINFORCE++."""

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        import torch

        from .group import group_advantages
        from .returns import whiten

        values = group_advantages(self.table(inputs), normalize_std=False, std_eps=1.0)
        return whiten(inputs.spread(torch.from_numpy(values)), inputs)
