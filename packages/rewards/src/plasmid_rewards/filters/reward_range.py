"""Keeps prompts of a chosen difficulty."""

from __future__ import annotations

from typing import Literal, Self

from plasmid import Filter, PromptGroup
from pydantic import Field, model_validator

from .finished import rewards


class RewardRange(Filter):
    """Keeps groups whose mean reward lies in [low, high]."""

    kind: Literal["reward-range"] = "reward-range"
    low: float = Field(allow_inf_nan=False)
    """Smallest mean reward to keep."""
    high: float = Field(allow_inf_nan=False)
    """Largest mean reward to keep."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}; every group would be dropped")
        return self

    def __call__(self, group: PromptGroup) -> bool:
        values = rewards(group)
        return len(values) > 0 and self.low <= float(values.mean()) <= self.high
