"""Keeps prompts of a chosen difficulty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from plasmid import Filter, PromptGroup
from pydantic import Field

from .finished import rewards


class RewardRange(Filter):
    """Keeps groups whose mean reward lies in [low, high]."""

    kind: Literal["reward-range"] = "reward-range"
    low: float = Field(allow_inf_nan=False)
    """Smallest mean reward to keep."""
    high: float = Field(allow_inf_nan=False)
    """Largest mean reward to keep."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.low > self.high:
            yield f"low = {self.low:g} is above high = {self.high:g}; every group would be dropped"

    def __call__(self, group: PromptGroup) -> bool:
        values = rewards(group)
        return len(values) > 0 and self.low <= float(values.mean()) <= self.high
