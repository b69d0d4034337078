"""Algorithms whose policy loss is PPO's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from .policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import LossInputs
    from .policy_loss import PolicyLoss


class Clipped(PolicyGradient):
    """Base of algorithms with PPO's clipped ratio of each token (Schulman et al. 2017, arXiv 1707.06347)."""

    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0.0, allow_inf_nan=False)
    """The probability ratio is clipped above at 1 + clip_high."""
    dual_clip: Literal["off"] | Annotated[float, Field(gt=1.0)] = "off"
    """More than 1: cap the loss of tokens with a negative advantage A at -dual_clip times A."""

    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        from .policy_loss import clipped_policy_loss

        return clipped_policy_loss(
            inputs.logprobs,
            old_logprobs,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=None if self.dual_clip == "off" else self.dual_clip,
        )

    def _metrics(self, inputs: LossInputs, policy: PolicyLoss, old: Tensor) -> dict[str, Tensor]:
        metrics = super()._metrics(inputs, policy, old)
        if self.dual_clip != "off":
            metrics["dual_clip_fraction"] = policy.dual_clipped.to(old.dtype)
        return metrics
