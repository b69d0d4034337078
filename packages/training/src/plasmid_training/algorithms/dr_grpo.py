"""Dr. GRPO ("GRPO done right")."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .parts.group import GroupBaseline, GroupPolicyGradient
from .parts.policy_loss import RatioClip


class DrGRPO(GroupBaseline, RatioClip, GroupPolicyGradient):
    """GRPO without its biases: no division by the standard deviation, and the same divisor for answers of any length.

    Formula: A = r - mean over the rollouts of the prompt; GRPO's token loss, summed and divided by
    constant_length x rollouts.
    Paper: Liu et al. 2025, arXiv 2503.20783
    Use: when answers get longer without getting better, or when very hard and very easy prompts should not weigh more.
    """

    kind: Literal["dr-grpo"] = "dr-grpo"
    reduction: Literal["constant"] = "constant"
    """How the token losses of an optimizer step are averaged: sum / (constant_length x number of rollouts)."""
    constant_length: int = Field(ge=1)
    """Divisor of each rollout's loss, in tokens; for example the maximum completion length."""
