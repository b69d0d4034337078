"""Base classes of policy-gradient algorithms: old policy, off-policy correction, KL and entropy in the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from plasmid.components import Algorithm, Needs, RecipeView
from plasmid.components.objective_inputs import TokenLoss
from plasmid.types import Role
from pydantic import Field

from .correction import Correction
from .kl import KLEstimator, kl_estimate
from .policy_loss import PolicyLoss, exp_difference
from .returns import subtract_penalties, token_kl

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
    from plasmid.types.batch import BatchTable
    from torch import Tensor

NO_KL = "because there is no KL; remove it, or set kl_coef or monitor_kl"


class PolicyGradient(Algorithm):
    """Base class of algorithms that weight the log-probabilities of sampled tokens by advantages.

    A subclass implements `policy_advantages` and `policy_loss`, usually with the functions in this package.
    """

    kl_coef: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    """Coefficient of the KL to the reference model in the loss; above 0, a reference model is loaded."""
    monitor_kl: bool = False
    """Load a reference model and report the KL even if kl_coef is 0."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL from the sampled tokens; k1 as a loss has zero expected gradient without unbiased_kl."""
    unbiased_kl: bool = False
    """Multiply the KL by the probability ratio, which makes its gradient unbiased."""
    entropy_coef: float = Field(0.0, allow_inf_nan=False)
    """Coefficient of the entropy bonus; the entropy is reported in any case."""
    old_policy: Literal["trainer", "rollout", "decoupled"] = "trainer"
    """Policy in the denominator of the probability ratio. trainer: the trainer's before the first optimizer step.
    rollout: the engine's. decoupled: the trainer's, with the loss weighted by the trainer's over the engine's
    probability as `correction` specifies."""
    correction: Correction = Correction()
    """With old_policy = "decoupled": importance weight of the policy loss (trainer over engine)."""
    opsm: Literal["off"] | Annotated[float, Field(ge=0.0)] = "off"
    """Threshold of the off-policy sequence mask, in nats: removes the policy loss of samples with negative advantage
    whose mean log-probability is lower than the engine's by more than this (DeepSeek-V3.2, arXiv 2512.02556)."""

    @abstractmethod
    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Return advantages [T] before `correction`, of any floating-point dtype."""

    @abstractmethod
    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        """Return the policy loss [T], without KL and entropy terms."""

    def advantage_roles(self) -> tuple[Role, ...]:
        """Return the roles whose scores `policy_advantages` reads."""
        return ()

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for name in ("kl_estimator", "unbiased_kl"):
            if not self._has_loss_kl and self._is_set(name):
                yield f"{name} = {getattr(self, name)!r} has no effect, {NO_KL}"
        if self.old_policy != "decoupled" and self._is_set("correction"):
            yield f'correction has no effect with old_policy = {self.old_policy!r}; remove it, or set it to "decoupled"'

    def needs(self) -> Needs:
        read = self.advantage_roles()
        reference = self._has_loss_kl or Role.REFERENCE in read
        return Needs(reference=reference, teacher=Role.TEACHER in read, critic=Role.CRITIC in read)

    def roles(self, *, steps: int) -> tuple[Role, ...]:
        """Return the roles to score before training.

        The policy is included only if its log-probabilities before the first step differ from the current ones.
        """
        read = set(self.advantage_roles()) | ({Role.REFERENCE} if self._has_loss_kl else set())
        if steps > 1 or self.correction.renormalize:
            read.add(Role.POLICY)
        if self.old_policy == "rollout":
            read.discard(Role.POLICY)
        return tuple(role for role in Role if role in read)

    def is_tokenwise(self) -> bool:
        """Return True if ``policy_loss`` is marked `tokenwise` and no mask or correction spans whole samples."""
        own = type(self)
        marked = own.loss is PolicyGradient.loss and getattr(own.policy_loss, "is_tokenwise", False)
        corrected = self.old_policy == "decoupled" and not self.correction.is_tokenwise()
        return marked and self.opsm == "off" and not corrected

    def weights_need_entropy(self) -> bool:
        return self.entropy_coef != 0

    def reads_rollout_logprobs(self) -> bool:
        return self.old_policy != "trainer" or self.opsm != "off"

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        values = self.policy_advantages(inputs).to(inputs.rollout_logprobs.dtype)
        return values / self._mean_weight(inputs) if self.correction.renormalize else values

    def loss(self, inputs: LossInputs) -> TokenLoss:
        """Return correction x policy loss + kl_coef KL(p || p_ref) - entropy_coef entropy of each token."""
        old = self._old_logprobs(inputs)
        policy = self.policy_loss(inputs, old)
        loss, metrics = policy.loss, _metrics(inputs, policy, old)
        if self.old_policy == "decoupled":
            weights = self.correction.weights(old - inputs.rollout_logprobs, inputs.sample_index, inputs.num_samples)
            loss = loss * weights.weight
            metrics["correction_weight"] = weights.weight
            metrics["correction_bounded"] = weights.bounded.to(weights.weight.dtype)
        if self.opsm != "off":
            seen = _opsm_mask(inputs, self.opsm)
            loss = loss * seen
            metrics["opsm_masked"] = 1 - seen
        if self._has_loss_kl:
            metrics["kl"] = kl = self._kl(inputs, old)
            loss = loss + self.kl_coef * kl if self.kl_coef else loss
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy
        if self.entropy_coef:
            if inputs.entropy is None:
                raise ValueError("entropy_coef needs the entropy, which the trainer did not compute")
            loss = loss - self.entropy_coef * inputs.entropy
        return TokenLoss(loss=loss, metrics=metrics)

    @property
    def _has_loss_kl(self) -> bool:
        return self.kl_coef != 0 or self.monitor_kl

    def _old_logprobs(self, inputs: LossInputs) -> Tensor:
        if self.old_policy == "rollout":
            return inputs.rollout_logprobs
        return inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs

    def _mean_weight(self, inputs: AdvantageInputs) -> Tensor:
        """Return the mean of the correction's weights over the loss tokens of all ranks; 1 if all of them are 0."""
        import torch

        assert inputs.old_logprobs is not None, "requested by roles()"
        log_ratio = inputs.old_logprobs - inputs.rollout_logprobs
        weight = self.correction.weights(log_ratio, inputs.sample_index, inputs.table.num_samples).weight.double()
        total, count = inputs.all_reduce(torch.stack([weight.sum(), weight.new_tensor(float(weight.numel()))]))
        mean = total / count.clamp(min=1)
        return torch.where(mean > 0, mean, 1.0).to(log_ratio.dtype)

    def _kl(self, inputs: LossInputs, old: Tensor) -> Tensor:
        if inputs.ref_logprobs is None:
            raise ValueError("the KL needs the scores of the reference")
        importance = exp_difference(inputs.logprobs - old) if self.unbiased_kl else None
        return kl_estimate(self.kl_estimator, inputs.logprobs, inputs.ref_logprobs, importance=importance)


class RewardPolicyGradient(PolicyGradient):
    """Base class of policy-gradient algorithms with rewards, optionally with a KL penalty in the reward."""

    reward_kl_coef: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    """Coefficient of the KL to the reference model subtracted from the reward; above 0, a reference model is loaded."""
    reward_kl_estimator: KLEstimator = "k1"
    """Estimator of the KL in the reward from the sampled tokens."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if not self.reward_kl_coef and self._is_set("reward_kl_estimator"):
            yield (
                f"reward_kl_estimator = {self.reward_kl_estimator!r} has no effect, because there is no KL in the "
                "reward; remove it, or set reward_kl_coef"
            )

    def advantage_roles(self) -> tuple[Role, ...]:
        return (Role.POLICY, Role.REFERENCE) if self.reward_kl_coef else ()

    def penalty(self, inputs: AdvantageInputs) -> Tensor | None:
        """Return the KL penalty [T] of each token; None without a KL in the reward."""
        if not self.reward_kl_coef:
            return None
        return self.reward_kl_coef * token_kl(inputs, self.reward_kl_estimator, old_policy=self.old_policy)

    def table(self, inputs: AdvantageInputs) -> BatchTable:
        """Return the batch with the KL penalties of each sample's tokens subtracted from its reward."""
        return subtract_penalties(inputs, self.penalty(inputs))


def _metrics(inputs: LossInputs, policy: PolicyLoss, old: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the policy loss; approx_kl is the k3 estimate of KL(old policy || current policy)."""
    now = inputs.logprobs.detach()
    metrics = {
        "clip_fraction": policy.clipped.to(now.dtype),
        "ratio_mean": policy.ratio.detach(),
        "approx_kl": kl_estimate("k3", old, now),
        "advantage_mean": inputs.advantages,
        "advantage_abs": inputs.advantages.abs(),
    }
    if policy.dual_clipped is not None:
        metrics["dual_clip_fraction"] = policy.dual_clipped.to(old.dtype)
    return metrics


def _opsm_mask(inputs: LossInputs, limit: float) -> Tensor:
    """Return a factor [T] of each token: 0 if `PolicyGradient.opsm` masks it, else 1."""
    now = inputs.logprobs.detach()
    counts = inputs.per_sample_sum(now.new_ones(now.shape)).clamp(min=1)
    divergence = inputs.per_sample_sum(inputs.rollout_logprobs - now) / counts
    return 1 - ((inputs.advantages < 0) & (divergence > limit)[inputs.sample_index]).to(now.dtype)
