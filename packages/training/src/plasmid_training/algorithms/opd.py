"""On-policy distillation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from plasmid.components import Needs
from plasmid.types import Role

from .parts.policy_gradient import PolicyGradient
from .parts.policy_loss import PolicyLoss, RatioClip, token_ratio

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
    from torch import Tensor


class OPD(RatioClip, PolicyGradient):
    """The policy samples, and each of its tokens is graded by how much more likely the teacher finds it.

    Formula: A_t = log p_teacher - log p of the drawn token, which descends the reverse KL(p || p_teacher) of each
    token; PPO's clipped token loss.
    Paper: Agarwal et al. 2023, arXiv 2306.13649; Gu et al. 2023, arXiv 2306.08543
    Use: to move the skills of a larger model with the same tokenizer into the policy; needs no rewards.
    """

    kind: Literal["opd"] = "opd"

    def needs(self) -> Needs:
        return replace(super().needs(), rewards=False)

    def advantage_roles(self) -> tuple[Role, ...]:
        return (Role.POLICY, Role.TEACHER)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        policy = inputs.rollout_logprobs if self.old_policy == "rollout" else inputs.old_logprobs
        if inputs.teacher_logprobs is None or policy is None:
            raise ValueError("policy and teacher must be scored for opd")
        return inputs.teacher_logprobs - policy

    def policy_loss(self, inputs: LossInputs, old_logprobs: Tensor) -> PolicyLoss:
        return self.clipped_loss(token_ratio(inputs, old_logprobs), inputs.advantages)
