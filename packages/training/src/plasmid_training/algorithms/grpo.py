"""Group relative policy optimization."""

from __future__ import annotations

from typing import Literal

from .parts.group import GroupNormalization, GroupPolicyGradient
from .parts.policy_loss import RatioClip


class GRPO(GroupNormalization, RatioClip, GroupPolicyGradient):
    """Rewards relative to their prompt group, PPO's clipped loss, and a KL to the reference model in the loss.

    Formula: A = (r - mean) / (std + std_eps) over the rollouts of the prompt; token loss
    max(-w A, -clip(w, 1 - clip_low, 1 + clip_high) A) with w = p / p_old; plus kl_coef KL(p || p_ref).
    Paper: Shao et al. 2024, arXiv 2402.03300
    Use: the default for verifiable rewards; needs several samples per prompt, no critic.
    """

    kind: Literal["grpo"] = "grpo"
