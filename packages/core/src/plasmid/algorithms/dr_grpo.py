"""GRPO done right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..components import Needs
from .clipped import Clipped
from .rewarded import Rewarded

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import AdvantageInputs


class DrGRPO(Rewarded, Clipped):
    """GRPO without its biases: no standard deviation, and one divisor for answers of every length.

    Formula: A = r - mean over the rollouts of the prompt; GRPO's token loss, summed and divided by
    constant_length x rollouts.
    Paper: Liu et al. 2025, arXiv 2503.20783
    Use: when answers grow longer without growing better, or when hard and easy prompts should not weigh more.
    """

    kind: Literal["dr-grpo"] = "dr-grpo"
    reduction: Literal["constant"] = "constant"
    """How token losses of a step are averaged: their sum is divided by constant_length times the rollouts."""
    constant_length: int = Field(ge=1)
    """Tokens that the loss of a rollout is divided by, for example the longest completion."""

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        import torch

        from .group import group_advantages

        values = group_advantages(self.table(inputs), normalize_std=False, std_eps=1.0)
        return inputs.spread(torch.from_numpy(values))
