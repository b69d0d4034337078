"""Group relative policy optimization, in the order of the paper (Shao et al. 2024, arXiv 2402.03300, section 4.1).

1. `GroupNormalization`: mean and standard deviation of a prompt's rewards give the advantage of each token.
2. `RatioClip`: the probability ratio of the current to the old policy gives the clipped loss of each token.
3. `PolicyGradient.loss` (for all policy gradients) adds kl_coef, the paper's beta, times the KL to the reference model.
   Its kl_estimator "k3" is the paper's p_ref / p - log(p_ref / p) - 1 of each sampled token.

N samples, R rollouts, G groups (prompts), T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from plasmid.components import RecipeView, Settings
from pydantic import Field

from .parts.group import GroupPolicyGradient, RewardGroups, leave_one_out_advantages
from .parts.policy_gradient import RewardPolicyGradient
from .parts.policy_loss import PolicyLoss, exp_difference, tokenwise

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from plasmid.components.objective_inputs import LossInputs
    from plasmid.types.batch import BatchTable
    from torch import Tensor

StdForm = Literal["sample", "population", "leave-one-out"]


class GroupNormalization(GroupPolicyGradient):
    """Advantages (r - mean) / (std + std_eps) within a prompt group, with settings of the division."""

    normalize_std: bool = True
    """Divide advantages by the standard deviation of their prompt group; Dr. GRPO does not."""
    std_form: StdForm = "sample"
    """Standard deviation of a group of n rollouts. sample: divisor n - 1. population: divisor n. leave-one-out: mean
    and standard deviation of the other rollouts only, without division if there are fewer than two others or their
    rewards are equal (as in NeMo-RL)."""
    std_eps: float = Field(1e-6, gt=0.0, allow_inf_nan=False)
    """Added to the standard deviation."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for name, shown in (("std_eps", f"{self.std_eps:g}"), ("std_form", repr(self.std_form))):
            if not self.normalize_std and self._is_set(name):
                yield f"{name} = {shown} has no effect with normalize_std = false; remove it"

    def compare(self, table: BatchTable) -> NDArray[np.float64]:
        return group_advantages(table, normalize_std=self.normalize_std, std_eps=self.std_eps, std_form=self.std_form)


def group_advantages(
    table: BatchTable, *, normalize_std: bool, std_eps: float = 1.0, std_form: StdForm = "sample"
) -> NDArray[np.float64]:
    """Return advantages [N]: (reward - mean) / (std + std_eps) of the group, or reward - mean (Dr. GRPO, 2503.20783).

    Statistics are over rollouts: the samples of one rollout count once, with their mean reward. The ``sample`` standard
    deviation has the divisor n - 1, as in TRL, verl and slime; the paper does not specify it. The divisor n
    (``population``, NumPy's default) gives advantages larger by sqrt(n / (n - 1)). With ``leave-one-out``, mean and
    standard deviation are those of the other rollouts, as in NeMo-RL. Advantages are only centered for a group of one
    rollout, and with ``leave-one-out`` for fewer than two others or equal rewards.
    """
    groups = RewardGroups.of(table)
    if normalize_std and std_form == "leave-one-out":
        std = groups.std_of_others()[groups.rollout]
        return np.asarray(leave_one_out_advantages(table) / np.where(std > 0, std + std_eps, 1.0), np.float64)
    advantages = table.rewards - groups.mean[table.group_index]
    if normalize_std:
        squares = np.bincount(groups.group, weights=(groups.values - groups.mean[groups.group]) ** 2)
        std = np.sqrt(squares / np.maximum(groups.size - (std_form == "sample"), 1))
        scale = np.where(groups.size > 1, std + std_eps, 1.0)
        advantages = advantages / scale[table.group_index]
    return np.asarray(advantages, np.float64)


class RatioClip(Settings):
    """Settings and loss of PPO's clipped ratio of each token (Schulman et al. 2017, arXiv 1707.06347)."""

    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """Lower bound of the probability ratio: 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0.0, allow_inf_nan=False)
    """Upper bound of the probability ratio: 1 + clip_high."""
    dual_clip: Literal["off"] | Annotated[float, Field(gt=1.0)] = "off"
    """Dual clip: caps the loss of tokens with a negative advantage A at -dual_clip x A; must be more than 1."""

    @tokenwise
    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        """Return the clipped loss [T] of each token; implements `PolicyGradient.policy_loss`."""
        return clipped_policy_loss(
            inputs.logprobs,
            old_logprobs,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=None if self.dual_clip == "off" else self.dual_clip,
        )


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Call `clipped_ratio_loss` with the ratio r = exp(logprobs - old_logprobs) of each token."""
    ratio = exp_difference(logprobs - old_logprobs)
    return clipped_ratio_loss(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped_ratio_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """Return max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) per token.

    Separate bounds follow DAPO (Yu et al. 2025, arXiv 2503.14476). ``dual_clip`` c > 1 caps the loss at -c A where
    A < 0 (Ye et al. 2020, arXiv 1912.09729).
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be more than 1, got {dual_clip}")
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, dual_clipped = plain.maximum(bounded), None
    if dual_clip is not None:
        cap = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (cap < loss)
        loss = cap.where(dual_clipped, loss)
    return PolicyLoss(loss=loss, ratio=ratio, clipped=bounded > plain, dual_clipped=dual_clipped)


class GRPO(GroupNormalization, RatioClip, RewardPolicyGradient):
    """Rewards relative to their prompt group, PPO's clipped loss, and a KL to the reference model in the loss.

    Formula: A = (r - mean) / (std + std_eps) over the rollouts of the prompt; token loss
    max(-w A, -clip(w, 1 - clip_low, 1 + clip_high) A) with w = p / p_old; plus kl_coef KL(p || p_ref).
    Paper: Shao et al. 2024, arXiv 2402.03300
    Use: the default for verifiable rewards; needs several samples per prompt, no critic.
    """

    kind: Literal["grpo"] = "grpo"
