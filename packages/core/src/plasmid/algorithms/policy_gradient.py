"""What every algorithm on sampled tokens shares: old policy, off-policy correction, KL and entropy in the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..components import Algorithm, Needs
from ..types import Role
from .correction import Correction, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import AdvantageInputs, LossInputs, TokenLoss
    from .policy_loss import PolicyLoss

NO_KL = "because there is no KL; remove it, or set kl_coef or monitor_kl"


class PolicyGradient(Algorithm):
    """Base of algorithms that weigh the probability of sampled tokens with advantages."""

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
    old_policy: Literal["trainer", "rollout", "decoupled"] = "trainer"
    """Whose log-probabilities the ratio divides by: the trainer's before the first step, or the engine's. decoupled:
    the trainer's, and the loss is weighted by the trainer's probability over the engine's, as `correction` says."""
    correction: Correction = Correction()
    """old_policy = "decoupled": the weight of the loss."""
    opsm: Literal["off"] | Annotated[float, Field(ge=0.0)] = "off"
    """Off-policy sequence mask: no policy loss for samples of negative advantage whose tokens have become less likely
    than under the engine by more than this on average, in nats (DeepSeek-V3.2, arXiv 2512.02556)."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        for name in ("kl_estimator", "unbiased_kl"):
            if not self._has_loss_kl and self._is_set(name):
                yield f"{name} = {getattr(self, name)!r} is never read, {NO_KL}"
        if self.old_policy != "decoupled" and self._is_set("correction"):
            yield f'correction is never read with old_policy = {self.old_policy!r}; remove it, or set it to "decoupled"'

    @property
    def _has_loss_kl(self) -> bool:
        return self.kl_coef != 0 or self.monitor_kl

    @property
    def _has_reference(self) -> bool:
        return self._has_loss_kl

    @property
    def _reads_old_logprobs_early(self) -> bool:
        """True if `advantages` reads the policy's log-probabilities before the first step."""
        return self.correction.renormalize

    def needs(self) -> Needs:
        return Needs(reference=self._has_reference)

    def roles(self, *, steps: int) -> tuple[Role, ...]:
        """The policy is scored only if its log-probabilities before the first step are not simply those now."""
        policy = self.old_policy != "rollout" and (steps > 1 or self._reads_old_logprobs_early)
        return ((Role.POLICY,) if policy else ()) + ((Role.REFERENCE,) if self._has_reference else ())

    def weights_need_entropy(self) -> bool:
        return self.entropy_coef != 0

    def reads_rollout_logprobs(self) -> bool:
        return self.old_policy != "trainer" or self.opsm != "off"

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        values = self.policy_advantages(inputs).to(inputs.rollout_logprobs.dtype)
        return values / self._mean_weight(inputs) if self.correction.renormalize else values

    @abstractmethod
    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """[T] advantages before `correction`, of any floating type."""

    @abstractmethod
    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        """[T] the loss of the policy alone."""

    def loss(self, inputs: LossInputs) -> TokenLoss:
        from .inputs import TokenLoss

        old = self._old_logprobs(inputs)
        policy: PolicyLoss = self.policy_loss(inputs, old)
        loss, metrics = policy.loss, self._metrics(inputs, policy, old)
        if self.old_policy == "decoupled":
            weights = self.correction.weights(old - inputs.rollout_logprobs, inputs.sample_index, inputs.num_samples)
            loss = loss * weights.weight
            metrics |= _weight_metrics(weights)
        if self.opsm != "off":
            seen = self._seen(inputs)
            loss = loss * seen
            metrics["opsm_masked"] = 1 - seen
        if self._has_loss_kl:
            metrics["kl"] = kl = self._kl(inputs, old)
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

    def _mean_weight(self, inputs: AdvantageInputs) -> Tensor:
        """Mean of the correction's weights over the loss tokens of all ranks; 1 where all of them are 0."""
        import torch

        assert inputs.old_logprobs is not None, "roles() asks for them"
        log_ratio = inputs.old_logprobs - inputs.rollout_logprobs
        weight = self.correction.weights(log_ratio, inputs.sample_index, inputs.table.num_samples).weight.double()
        total, count = inputs.all_reduce(torch.stack([weight.sum(), weight.new_tensor(float(weight.numel()))]))
        mean = total / count.clamp(min=1)
        return torch.where(mean > 0, mean, 1.0).to(log_ratio.dtype)

    def _seen(self, inputs: LossInputs) -> Tensor:
        """[T] 0 on tokens that `opsm` masks, else 1."""
        import torch

        assert self.opsm != "off"
        now = inputs.logprobs.detach()
        counts = inputs.per_sample_sum(torch.ones_like(now)).clamp(min=1)
        divergence = inputs.per_sample_sum(inputs.rollout_logprobs - now) / counts
        return 1 - ((inputs.advantages < 0) & (divergence > self.opsm)[inputs.sample_index]).to(now.dtype)

    def _kl(self, inputs: LossInputs, old: Tensor) -> Tensor:
        from .kl import kl_estimate
        from .ratio import exp_difference

        if inputs.ref_logprobs is None:
            raise ValueError("the reference must be scored for the KL")
        importance = exp_difference(inputs.logprobs - old) if self.unbiased_kl else None
        return kl_estimate(self.kl_estimator, inputs.logprobs, inputs.ref_logprobs, importance=importance)

    def _metrics(self, inputs: LossInputs, policy: PolicyLoss, old: Tensor) -> dict[str, Tensor]:
        """approx_kl is k3 of the old policy to the new one: how far the steps on this batch have moved it."""
        from .kl import kl_estimate

        now = inputs.logprobs.detach()
        return {
            "clip_fraction": policy.clipped.to(now.dtype),
            "ratio_mean": policy.ratio.detach(),
            "approx_kl": kl_estimate("k3", old, now),
            "advantage_mean": inputs.advantages,
            "advantage_abs": inputs.advantages.abs(),
        }


def _weight_metrics(weights: Weights) -> dict[str, Tensor]:
    return {"correction_weight": weights.weight, "correction_bounded": weights.bounded.to(weights.weight.dtype)}
