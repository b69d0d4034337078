"""Leaves out prompts whose samples are too short or too long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from plasmid import Filter, PromptGroup
from pydantic import Field

from .finished import finished


class LengthRange(Filter):
    """Keeps groups whose samples have a number of generated tokens in [min_tokens, max_tokens]."""

    kind: Literal["length-range"] = "length-range"
    min_tokens: int = Field(0, ge=0)
    """Fewest generated tokens to keep."""
    max_tokens: int = Field(ge=1)
    """Most generated tokens to keep."""
    of: Literal["mean", "shortest", "longest"] = "mean"
    """Whose length counts: the mean of a group, its shortest or its longest sample."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.min_tokens > self.max_tokens:
            yield (
                f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}; every group would be dropped"
            )

    def __call__(self, group: PromptGroup) -> bool:
        lengths = [sample.num_generated for sample in finished(group)]
        if not lengths:
            return False
        length = {"mean": float(np.mean(lengths)), "shortest": min(lengths), "longest": max(lengths)}[self.of]
        return self.min_tokens <= length <= self.max_tokens
