"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from plasmid.components import Algorithm, Needs, Reduction
from plasmid.components.objective_inputs import TokenLoss
from plasmid.types import Role

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
    from torch import Tensor


class SFT(Algorithm):
    """The likelihood of demonstrations; no engine, no rewards.

    Formula: token loss -log p on what the demonstration's assistant writes.
    Paper: Ouyang et al. 2022, arXiv 2203.02155, step 1
    Use: a warm start before reinforcement learning: a format, a language, a tool's syntax.
    """

    kind: Literal["sft"] = "sft"
    reduction: Reduction = "per-token"
    """How token losses of a step are averaged: all tokens alike; per-rollout gives every demonstration one weight."""

    def needs(self) -> Needs:
        return Needs(rewards=False, engine=False, demonstrations=True)

    def roles(self, *, steps: int) -> tuple[Role, ...]:
        return ()

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Every token of a demonstration is worth the same."""
        return inputs.rollout_logprobs.new_ones(inputs.rollout_logprobs.shape)

    def loss(self, inputs: LossInputs) -> TokenLoss:
        metrics = {} if inputs.entropy is None else {"entropy": inputs.entropy}
        return TokenLoss(loss=-inputs.logprobs, metrics=metrics)
