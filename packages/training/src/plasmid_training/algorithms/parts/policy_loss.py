"""Policy losses on the probability ratio (current over old policy). No ratio can overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from plasmid.components import Settings
from pydantic import Field

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import LossInputs
    from torch import Tensor

Method = TypeVar("Method", bound=Callable[..., Any])
LIMIT = 20.0
"""Largest absolute difference of log-probabilities that is exponentiated: e^20 is 4.9e8. Beyond it the value is
constant and has no gradient; without a limit, one token could make the gradient infinite or NaN."""


def exp_difference(difference: Tensor) -> Tensor:
    """Exponentiate a difference of log-probabilities, clamped to +-`LIMIT`."""
    return difference.clamp(-LIMIT, LIMIT).exp()


def tokenwise(method: Method) -> Method:
    """Mark a ``policy_loss`` in which the loss of a token depends on that token's inputs only."""
    method.is_tokenwise = True  # type: ignore[attr-defined]
    return method


def token_ratio(inputs: LossInputs, old_logprobs: Tensor) -> Tensor:
    """Return the ratio [T] p / p_old of each token."""
    return exp_difference(inputs.logprobs - old_logprobs)


def sequence_ratio(inputs: LossInputs, old_logprobs: Tensor) -> Tensor:
    """Return GSPO's ratio [T]: exp of the mean of logprobs - old_logprobs over the tokens of each token's sample."""
    difference = inputs.logprobs - old_logprobs
    counts = inputs.per_sample_sum(difference.new_ones(difference.shape)).clamp(min=1)
    return exp_difference(inputs.per_sample_sum(difference) / counts)[inputs.sample_index]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLoss:
    """Policy loss and its statistics; [T] each."""

    loss: Tensor
    ratio: Tensor
    """Probability ratio of the current to the old policy; carries the gradient."""
    clipped: Tensor
    """bool: the clip raised the loss, so the token has no gradient."""
    dual_clipped: Tensor | None = None
    """bool: the dual clip lowered the loss, so the token has no gradient; None without a dual clip."""


class RatioClip(Settings):
    """Settings of PPO's clipped ratio of each token (Schulman et al. 2017, arXiv 1707.06347)."""

    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """Lower bound of the probability ratio: 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0.0, allow_inf_nan=False)
    """Upper bound of the probability ratio: 1 + clip_high."""
    dual_clip: Literal["off"] | Annotated[float, Field(gt=1.0)] = "off"
    """Dual clip: caps the loss of tokens with a negative advantage A at -dual_clip x A; must be more than 1."""

    @tokenwise
    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        """Return PPO's clipped loss [T] of each token; implements `PolicyGradient.policy_loss`."""
        return self.clipped_loss(token_ratio(inputs, old_logprobs), inputs.advantages)

    def clipped_loss(self, ratio: Tensor, advantages: Tensor) -> PolicyLoss:
        """Call `clipped_ratio_loss` with these settings."""
        dual_clip = None if self.dual_clip == "off" else self.dual_clip
        return clipped_ratio_loss(
            ratio, advantages, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=dual_clip
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
    """Call `clipped_ratio_loss` with r = exp(logprobs - old_logprobs) of each token."""
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


def weighted_likelihood_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Return CISPO's loss -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs; clipped tokens keep a gradient."""
    ratio = exp_difference(logprobs - old_logprobs)
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(loss=-weight * advantages * logprobs, ratio=ratio, clipped=weight != ratio.detach())
