"""Keeps samples from growing too long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from plasmid import Prompt, Reward, Sample
from pydantic import Field


class Length(Reward):
    """0.0 for short samples, falling in a line to -1.0 at `max_tokens`, and -1.0 beyond.

    The soft overlong punishment of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 13).
    """

    kind: Literal["length"] = "length"
    max_tokens: int = Field(ge=1)
    """Generated tokens at which the value reaches -1."""
    slope_tokens: int = Field(ge=1)
    """Tokens before `max_tokens` over which the value falls."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.slope_tokens > self.max_tokens:
            yield f"slope_tokens must be at most max_tokens = {self.max_tokens}, got {self.slope_tokens}"

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        over = sample.num_generated - (self.max_tokens - self.slope_tokens)
        return -min(1.0, max(0, over) / self.slope_tokens)
