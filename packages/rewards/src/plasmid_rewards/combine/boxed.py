"""Shows another reward only what stands in the box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from plasmid import Prompt, Reward, Sample, Score
from pydantic import AfterValidator, Field, SerializeAsAny

from ..mathematics.boxed_text import last_boxed
from .combined import Combined, alone, ask


class Boxed(Combined):
    r"""What another reward says of the content of the last ``\boxed{...}``; `missing` for texts without a box."""

    kind: Literal["boxed"] = "boxed"
    reward: Annotated[SerializeAsAny[Reward], AfterValidator(alone)]
    """The reward that judges the content."""
    missing: float = Field(0.0, allow_inf_nan=False)
    """Value of a text without a box."""

    def children(self) -> tuple[Reward, ...]:
        return (self.reward,)

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        inside = [last_boxed(sample.text) for sample in samples]
        shown = [replace(s, text=text) for s, text in zip(samples, inside, strict=True) if text is not None]
        scores = iter(await ask(self.reward, prompt, shown))
        return [Score(value=self.missing, error="no box") if text is None else next(scores) for text in inside]
