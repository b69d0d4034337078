"""Dr. GRPO ("GRPO done right")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from .grpo import RatioClip, group_advantages
from .parts.group import GroupPolicyGradient
from .parts.policy_gradient import RewardPolicyGradient

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from plasmid.types.batch import BatchTable


class DrGRPO(GroupPolicyGradient, RatioClip, RewardPolicyGradient):
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

    def compare(self, table: BatchTable) -> NDArray[np.float64]:
        return group_advantages(table, normalize_std=False)
