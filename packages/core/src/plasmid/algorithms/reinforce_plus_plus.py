"""REINFORCE with PPO's clip and advantages normalised over the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..components import Reduction
from .clipped import Clipped
from .rewarded import Rewarded

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import AdvantageInputs


class ReinforcePlusPlus(Rewarded, Clipped):
    """Returns of each token, normalised over all tokens of the batch; no critic, no prompt groups.

    Formula: G_t = sum over k >= t of gamma^(k - t) (r_k - reward_kl_coef KL_k), where r_k is the reward on the last
    token and 0 before; A = (G - mean) / sqrt(var + 1e-8) over the batch; PPO's clipped token loss.
    Paper: Hu et al. 2025, arXiv 2501.03262
    Use: one sample of each prompt, many prompts.
    """

    kind: Literal["reinforce-plus-plus"] = "reinforce-plus-plus"
    reduction: Reduction = "per-token"
    """How token losses of a step are averaged: all tokens alike in REINFORCE++."""
    gamma: float = Field(1.0, gt=0.0, le=1.0)
    """Discount for each token between a reward and the token that earns it."""

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        from .returns import discounted_sums, whiten
        from .reward_kl import token_rewards

        returns = discounted_sums(token_rewards(inputs, self.penalty(inputs)), inputs.sample_index, self.gamma)
        return whiten(returns, inputs)
