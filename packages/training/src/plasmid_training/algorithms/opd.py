"""On-policy distillation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from plasmid.components import Needs
from plasmid.types import Role

from .grpo import RatioClip
from .parts.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs
    from torch import Tensor


class OPD(RatioClip, PolicyGradient):
    """Distillation on the policy's own samples; each token's advantage is log p_teacher - log p.

    Formula: A_t = log p_teacher - log p of the sampled token, which minimizes the reverse KL(p || p_teacher) per token;
    PPO's clipped token loss.
    Paper: Agarwal et al. 2023, arXiv 2306.13649; Gu et al. 2023, arXiv 2306.08543
    Use: to transfer the skills of a larger model with the same tokenizer to the policy; needs no rewards.
    """

    kind: Literal["opd"] = "opd"

    def needs(self) -> Needs:
        return replace(super().needs(), rewards=False)

    def advantage_roles(self) -> tuple[Role, ...]:
        return (Role.POLICY, Role.TEACHER)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        policy = inputs.rollout_logprobs if self.old_policy == "rollout" else inputs.old_logprobs
        if inputs.teacher_logprobs is None or policy is None:
            raise ValueError("opd needs the scores of policy and teacher")
        return inputs.teacher_logprobs - policy
