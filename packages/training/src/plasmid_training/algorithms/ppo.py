"""Proximal policy optimization with a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from plasmid.components import ActorCritic, Reduction
from plasmid.components.objective_inputs import TokenLoss
from plasmid.types import Role
from pydantic import Field

from .grpo import RatioClip
from .parts.policy_gradient import RewardPolicyGradient
from .parts.returns import gae, token_rewards, whiten

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, ValueInputs
    from torch import Tensor


class PPO(RatioClip, RewardPolicyGradient, ActorCritic):
    """Generalized advantage estimation (GAE) with a critic that is trained together with the policy.

    Formula: r_t = reward on the last token - reward_kl_coef KL_t; d_t = r_t + gamma V_(t+1) - V_t;
    A_t = d_t + gamma lam A_(t+1), then (A - mean) / sqrt(var + 1e-8) over the batch; PPO's clipped token loss; the
    critic learns R_t = A_t + V_t (before whitening) by max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).
    Paper: Schulman et al. 2017, arXiv 1707.06347; GAE: Schulman et al. 2016, arXiv 1506.02438
    Use: when credit differs between the tokens of a sample, or with one sample per prompt; costs a second model.
    """

    kind: Literal["ppo"] = "ppo"
    reduction: Reduction = "per-token"
    """How the token losses of an optimizer step are averaged, for policy and critic."""
    gamma: float = Field(1.0, gt=0.0, le=1.0)
    """Discount factor per token."""
    lam: float = Field(0.95, ge=0.0, le=1.0)
    """Lambda of GAE: 1 uses the rewards only, 0 the critic's value of the next token only."""
    whiten: bool = True
    """Normalize advantages over all tokens of the batch."""
    value_clip: Literal["off"] | Annotated[float, Field(gt=0.0)] = 0.2
    """Clip range of the critic's values around those before the first optimizer step of the batch; ``off`` disables
    value clipping."""

    def advantage_roles(self) -> tuple[Role, ...]:
        """Return the roles to score; always includes the critic, whose values before the first step are needed."""
        return (*super().advantage_roles(), Role.CRITIC)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        estimates = self._estimates(inputs)
        return whiten(estimates, inputs) if self.whiten else estimates

    def returns(self, inputs: AdvantageInputs) -> Tensor:
        assert inputs.values is not None, "requested by roles()"
        return (self._estimates(inputs) + inputs.values.double()).to(inputs.values.dtype)

    def _estimates(self, inputs: AdvantageInputs) -> Tensor:
        if inputs.values is None:
            raise ValueError("ppo needs the critic's values")
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
