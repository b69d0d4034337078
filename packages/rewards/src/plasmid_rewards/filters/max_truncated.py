"""Leaves out prompts whose samples mostly hit the length limit."""

from __future__ import annotations

from typing import Literal

from plasmid import Filter, PromptGroup, StopReason
from pydantic import Field

from .finished import finished


class MaxTruncated(Filter):
    """Keeps groups of which at most a fraction of the samples was cut off by the length limit."""

    kind: Literal["max-truncated"] = "max-truncated"
    fraction: float = Field(0.5, ge=0, lt=1)
    """Largest fraction of truncated samples to keep."""

    def __call__(self, group: PromptGroup) -> bool:
        samples = finished(group)
        cut = sum(sample.stop_reason is StopReason.LENGTH for sample in samples)
        return len(samples) > 0 and cut <= self.fraction * len(samples)
