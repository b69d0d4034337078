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
    """Maximum likelihood on demonstrations; needs no engine and no rewards.

    Formula: token loss -log p on the assistant's tokens of each demonstration.
    Paper: Ouyang et al. 2022, arXiv 2203.02155, step 1
    Use: a warm start before reinforcement learning, to teach a format, a language or the syntax of a tool.
    """

    kind: Literal["sft"] = "sft"
    reduction: Reduction = "per-token"
    """How the token losses of an optimizer step are averaged; ``per-rollout`` weighs all demonstrations equally."""

    def needs(self) -> Needs:
        return Needs(rewards=False, engine=False, demonstrations=True)

    def roles(self, *, steps: int) -> tuple[Role, ...]:
        return ()

    def is_tokenwise(self) -> bool:
        return type(self).loss is SFT.loss

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Return 1 for every token."""
        return inputs.rollout_logprobs.new_ones(inputs.rollout_logprobs.shape)

    def loss(self, inputs: LossInputs) -> TokenLoss:
        metrics = {} if inputs.entropy is None else {"entropy": inputs.entropy}
        return TokenLoss(loss=-inputs.logprobs, metrics=metrics)
