"""Generalized knowledge distillation: on-policy distillation over the teacher's top tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from plasmid.components import Algorithm, Needs
from plasmid.components.objective_inputs import TokenLoss
from plasmid.types import Role
from pydantic import Field

from .parts.top_divergence import Divergence, top_divergence

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
    from torch import Tensor


class GKD(Algorithm):
    """Distillation on the policy's own samples, by the KL over the teacher's top_k most likely tokens at each position.

    Formula: token loss sum p_i log(p_i / q_i) over the teacher's top_k tokens and the tail (all other tokens, merged
    into one), for the policy p and the teacher q; with divergence = "forward", sum q_i log(q_i / p_i).
    Paper: Agarwal et al. 2023, arXiv 2306.13649; Gu et al. 2023, arXiv 2306.08543
    Use: as `opd`, but with a gradient from all of the teacher's likely tokens, not only the sampled one: less noise
    per sample, but K times as much data from the teacher.
    """

    kind: Literal["gkd"] = "gkd"
    top_k: int = Field(20, ge=1)
    """Number K of the teacher's most likely tokens at each position. Servers may limit this number."""
    divergence: Divergence = "reverse"
    """Direction of the KL. reverse: KL(policy || teacher), which avoids tokens that the teacher finds unlikely
    (mode-seeking). forward: KL(teacher || policy), which covers all tokens that the teacher finds likely."""

    def needs(self) -> Needs:
        return Needs(rewards=False, teacher=True, teacher_top_k=self.top_k)

    def roles(self, *, steps: int) -> tuple[Role, ...]:
        return (Role.TEACHER,)

    def is_tokenwise(self) -> bool:
        return type(self).loss is GKD.loss

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Return 0 for every token: the loss has no advantages."""
        return inputs.rollout_logprobs.new_zeros(inputs.rollout_logprobs.shape)

    def loss(self, inputs: LossInputs) -> TokenLoss:
        policy, teacher = inputs.top_logprobs, inputs.teacher_top_logprobs
        if policy is None or teacher is None:
            raise ValueError("gkd needs the teacher's top tokens")
        divergence = top_divergence(self.divergence, policy, teacher.to(policy.dtype))
        metrics = {
            "teacher_kl": divergence.detach(),
            "teacher_coverage": teacher.exp().sum(1).to(policy.dtype),
            "policy_coverage": policy.detach().exp().sum(1),
        }
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy
        return TokenLoss(loss=divergence, metrics=metrics)
