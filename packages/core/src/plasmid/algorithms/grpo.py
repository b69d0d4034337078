"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from ..components import Algorithm, Needs
from ..types import Role

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import AdvantageInputs, LossInputs, TokenLoss
    from .policy_loss import PolicyLoss


class GRPO(Algorithm):
    """Rewards relative to their prompt group, PPO's clipped loss, and a KL to the reference model in the loss."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0.0, allow_inf_nan=False)
    """The probability ratio is clipped above at 1 + clip_high."""
    dual_clip: Literal["off"] | Annotated[float, Field(gt=1.0)] = "off"
    """More than 1: cap the loss of tokens with a negative advantage A at -dual_clip times A."""
    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group; off in Dr. GRPO."""
    std_eps: float = Field(1e-6, gt=0.0, allow_inf_nan=False)
    """Added to the standard deviation."""
    kl_coef: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the KL to the reference model in the loss; more than 0 keeps a reference model."""
    monitor_kl: bool = False
    """Keep a reference model and report the KL even if kl_coef is 0."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """How the KL is estimated from the drawn tokens; as a loss, k1 has no gradient on average unless unbiased_kl."""
    unbiased_kl: bool = False
    """Multiply the KL by the probability ratio, which makes its gradient unbiased."""
    entropy_coef: float = Field(0.0, allow_inf_nan=False)
    """Weight of the entropy bonus; the entropy is reported in any case."""
    old_policy: Literal["trainer", "rollout"] = "trainer"
    """Whose log-probabilities the ratio divides by: the trainer's before the first step, or the engine's."""

    @model_validator(mode="after")
    def _every_setting_is_read(self) -> Self:
        for name in ("kl_estimator", "unbiased_kl"):
            if getattr(self, name) != type(self).model_fields[name].default and not self._has_reference:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} is never read, because there is no KL; "
                    "remove it, or set kl_coef or monitor_kl"
                )
        if not self.normalize_std and self.std_eps != type(self).model_fields["std_eps"].default:
            raise ValueError(f"std_eps = {self.std_eps:g} is never read with normalize_std = false; remove it")
        return self

    @property
    def _has_reference(self) -> bool:
        return self.kl_coef != 0 or self.monitor_kl

    def needs(self) -> Needs:
        return Needs(reference=self._has_reference)

    def roles(self, *, steps: int) -> tuple[Role, ...]:
        """The policy is scored only if it moves between the batch's steps; else its log-probabilities are those now."""
        policy = (Role.POLICY,) if steps > 1 and self.old_policy == "trainer" else ()
        return policy + ((Role.REFERENCE,) if self._has_reference else ())

    def weights_need_entropy(self) -> bool:
        return self.entropy_coef != 0

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        import torch

        from .group import group_advantages

        values = group_advantages(inputs.table, normalize_std=self.normalize_std, std_eps=self.std_eps)
        like = inputs.rollout_logprobs
        return torch.as_tensor(values, dtype=like.dtype, device=like.device)[inputs.sample_index]

    def loss(self, inputs: LossInputs) -> TokenLoss:
        from .inputs import TokenLoss
        from .policy_loss import clipped_policy_loss

        old = self._old_logprobs(inputs)
        policy = clipped_policy_loss(
            inputs.logprobs,
            old,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=None if self.dual_clip == "off" else self.dual_clip,
        )
        loss = policy.loss
        metrics = self._metrics(inputs, policy, old)
        if self._has_reference:
            metrics["kl"] = kl = self._kl(inputs, policy)
            loss = loss + self.kl_coef * kl if self.kl_coef else loss
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy
        if self.entropy_coef:
            if inputs.entropy is None:
                raise ValueError("the trainer must compute the entropy for entropy_coef")
            loss = loss - self.entropy_coef * inputs.entropy
        return TokenLoss(loss=loss, metrics=metrics)

    def _old_logprobs(self, inputs: LossInputs) -> Tensor:
        if self.old_policy == "rollout":
            return inputs.rollout_logprobs
        return inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs

    def _kl(self, inputs: LossInputs, policy: PolicyLoss) -> Tensor:
        from .kl import kl_estimate

        if inputs.ref_logprobs is None:
            raise ValueError("the reference must be scored for the KL")
        importance = policy.ratio if self.unbiased_kl else None
        return kl_estimate(self.kl_estimator, inputs.logprobs, inputs.ref_logprobs, importance=importance)

    def _metrics(self, inputs: LossInputs, policy: PolicyLoss, old: Tensor) -> dict[str, Tensor]:
        """approx_kl is k3 of the old policy to the new one: how far the steps on this batch have moved it."""
        from .kl import kl_estimate

        now = inputs.logprobs.detach()
        metrics = {
            "clip_fraction": policy.clipped.to(now.dtype),
            "ratio_mean": policy.ratio.detach(),
            "approx_kl": kl_estimate("k3", old, now),
            "advantage_mean": inputs.advantages,
            "advantage_abs": inputs.advantages.abs(),
        }
        if self.dual_clip != "off":
            metrics["dual_clip_fraction"] = policy.dual_clipped.to(now.dtype)
        return metrics
