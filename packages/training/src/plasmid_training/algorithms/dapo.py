"""Decoupled clip and dynamic sampling policy optimization."""

from __future__ import annotations

from typing import Literal

from plasmid.components import Reduction
from pydantic import Field

from .grpo import GroupNormalization, RatioClip
from .parts.policy_gradient import RewardPolicyGradient


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
