"""Clipped importance sampling policy optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from plasmid.components import Reduction
from pydantic import Field

from .grpo import GroupNormalization
from .parts.policy_loss import PolicyLoss, exp_difference, tokenwise

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import LossInputs
    from torch import Tensor


class CISPO(GroupNormalization):
    """REINFORCE weighted by the clipped probability ratio: weights are bounded, and every token keeps its gradient.

    Formula: A as in GRPO; token loss -sg(clip(w, 1 - clip_low, 1 + clip_high)) A log p with w = p / p_old, where sg
    stops the gradient.
    Paper: MiniMax 2025, arXiv 2506.13585
    Use: several steps per batch, or stale samples, where PPO's clip would remove the gradient of rare, decisive tokens.
    """

    kind: Literal["cispo"] = "cispo"
    reduction: Reduction = "per-token"
    """How the token losses of an optimizer step are averaged; CISPO weighs all tokens equally."""
    clip_low: float = Field(1.0, ge=0.0, le=1.0)
    """Lower bound of the weight: 1 - clip_low."""
    clip_high: float = Field(4.0, ge=0.0, allow_inf_nan=False)
    """Upper bound of the weight: 1 + clip_high."""

    @tokenwise
    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        ratio = exp_difference(inputs.logprobs - old_logprobs)
        weight = ratio.detach().clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -weight * inputs.advantages * inputs.logprobs
        return PolicyLoss(loss=loss, ratio=ratio, clipped=weight != ratio.detach())
