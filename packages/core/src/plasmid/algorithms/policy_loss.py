"""The clipped policy gradient of PPO (Schulman et al. 2017, arXiv 1707.06347) with what was added to it since."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import LossInputs
from .ratio import exp_difference


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLoss:
    """[T] each."""

    loss: Tensor
    ratio: Tensor
    """Probability of the token now over before; carries the gradient."""
    clipped: Tensor
    """bool: the clip raised the loss, so that the token has no gradient."""
    dual_clipped: Tensor
    """bool: the dual clip lowered the loss, so that the token has no gradient."""


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """`clipped_ratio_loss` with r = exp(logprobs - old_logprobs) of each token."""
    ratio = exp_difference(logprobs - old_logprobs)
    return clipped_ratio_loss(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped_ratio_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) per token.

    Two bounds are DAPO's (Yu et al. 2025, arXiv 2503.14476). ``dual_clip`` c > 1 caps the loss at -c A where A < 0
    (Ye et al. 2020, arXiv 1912.09729).
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be more than 1, got {dual_clip}")
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    dual_clipped = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        cap = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (cap < loss)
        loss = torch.where(dual_clipped, cap, loss)
    return PolicyLoss(loss=loss, ratio=ratio, clipped=bounded > plain, dual_clipped=dual_clipped)


def sequence_ratio(inputs: LossInputs, old_logprobs: Tensor) -> Tensor:
    """[T] of GSPO: exp of the mean of logprobs - old_logprobs over the tokens of each token's sample."""
    difference = inputs.logprobs - old_logprobs
    counts = inputs.per_sample_sum(torch.ones_like(difference)).clamp(min=1)
    return exp_difference(inputs.per_sample_sum(difference) / counts)[inputs.sample_index]


def weighted_likelihood_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs per token. Clipped tokens keep a gradient."""
    ratio = exp_difference(logprobs - old_logprobs)
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(
        loss=-weight * advantages * logprobs,
        ratio=ratio,
        clipped=weight != ratio.detach(),
        dual_clipped=torch.zeros_like(ratio, dtype=torch.bool),
    )
