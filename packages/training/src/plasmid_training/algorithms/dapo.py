"""Decoupled clip and dynamic sampling policy optimization."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from plasmid.components import Needs, Reduction
from pydantic import Field

from .parts.group import GroupNormalization
from .parts.policy_gradient import RewardPolicyGradient
from .parts.policy_loss import RatioClip

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs
    from torch import Tensor


class DAPO(GroupNormalization, RatioClip, RewardPolicyGradient):
    """GRPO with equal weight for all tokens, a higher upper clip bound (clip-higher), and no KL.

    Formula: A as in GRPO; token loss max(-w A, -clip(w, 1 - clip_low, 1 + clip_high) A), averaged over all tokens of
    the step. Its dynamic sampling is the filter "nonzero-spread", its overlong shaping the reward "length".
    Paper: Yu et al. 2025, arXiv 2503.14476
    Use: long chains of thought, where GRPO's mean over each rollout gives the tokens of long answers little weight.
    """

    kind: Literal["dapo"] = "dapo"
    reduction: Reduction = "per-token"
    """How the token losses of an optimizer step are averaged; DAPO weighs all tokens equally."""
    clip_high: float = Field(0.28, ge=0.0, allow_inf_nan=False)
    """Upper bound of the probability ratio: 1 + clip_high."""

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        return self.relative_rewards(inputs, self.table(inputs))
