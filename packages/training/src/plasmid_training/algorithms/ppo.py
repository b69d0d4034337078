"""Proximal policy optimization with a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from plasmid.components import ActorCritic, Reduction
from plasmid.components.objective_inputs import TokenLoss
from plasmid.types import Role
from pydantic import Field

from .parts.policy_gradient import RewardPolicyGradient
from .parts.policy_loss import PolicyLoss, RatioClip, token_ratio
from .parts.returns import gae, token_rewards, whiten

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, LossInputs, ValueInputs
    from torch import Tensor


class PPO(RatioClip, RewardPolicyGradient, ActorCritic):
    """Generalized advantage estimates from a critic, which is trained beside the policy.

    Formula: r_t = reward on the last token - reward_kl_coef KL_t; d_t = r_t + gamma V_(t+1) - V_t;
    A_t = d_t + gamma lam A_(t+1), then (A - mean) / sqrt(var + 1e-8) over the batch; PPO's clipped token loss; the
    critic learns R_t = A_t + V_t (before whitening) by max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).
    Paper: Schulman et al. 2017, arXiv 1707.06347; GAE: Schulman et al. 2016, arXiv 1506.02438
    Use: when rewards of single tokens differ, or one sample of each prompt must do; costs a second model.
    """

    kind: Literal["ppo"] = "ppo"
    reduction: Reduction = "per-token"
    """How token losses of a step are averaged, of the policy and the critic."""
    gamma: float = Field(1.0, gt=0.0, le=1.0)
    """Discount for each token between a reward and the token that earns it."""
    lam: float = Field(0.95, ge=0.0, le=1.0)
    """Lambda of the estimates: 1 trusts the rewards alone, 0 the critic's value of the next token."""
    whiten: bool = True
    """Normalise advantages over all tokens of the batch."""
    value_clip: Literal["off"] | Annotated[float, Field(gt=0.0)] = 0.2
    """How far the critic's values may move from those before the first step before their loss stops to fall."""

    def advantage_roles(self) -> tuple[Role, ...]:
        """The critic's values before the first step are always read."""
        return (*super().advantage_roles(), Role.CRITIC)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        estimates = self._estimates(inputs)
        return whiten(estimates, inputs) if self.whiten else estimates

    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        return self.clipped_loss(token_ratio(inputs, old_logprobs), inputs.advantages)

    def returns(self, inputs: AdvantageInputs) -> Tensor:
        assert inputs.values is not None, "roles() asks for them"
        return (self._estimates(inputs) + inputs.values.double()).to(inputs.values.dtype)

    def _estimates(self, inputs: AdvantageInputs) -> Tensor:
        if inputs.values is None:
            raise ValueError("the critic must be scored for ppo")
        rewards = token_rewards(inputs, self.penalty(inputs))
        return gae(rewards, inputs.values.double(), inputs.sample_index, gamma=self.gamma, lam=self.lam)

    def value_loss(self, inputs: ValueInputs) -> TokenLoss:
        values, returns = inputs.values, inputs.returns
        loss = (values - returns) ** 2
        now = values.detach()
        metrics = {"value_mean": now, "return_mean": returns, "value_error": (now - returns) ** 2}
        if self.value_clip != "off":
            moved = values - inputs.old_values
            near = inputs.old_values + moved.clamp(-self.value_clip, self.value_clip)
            loss = loss.maximum((near - returns) ** 2)
            metrics["value_clip_fraction"] = (moved.detach().abs() > self.value_clip).to(now.dtype)
        return TokenLoss(loss=loss, metrics=metrics)
