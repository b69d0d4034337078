"""One reward counts only where another one is content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from plasmid import Prompt, Reward, Sample, Score
from pydantic import AfterValidator, Field, SerializeAsAny

from .combined import Combined, ask, components, names, unweighted


class Gate(Combined):
    """`reward` where `condition` reaches `at_least`, elsewhere `closed`: the format must hold before the answer counts.

    The reward is not asked about samples that do not pass.
    """

    kind: Literal["gate"] = "gate"
    condition: Annotated[SerializeAsAny[Reward], AfterValidator(unweighted)]
    """The reward that decides."""
    at_least: float = Field(1.0, allow_inf_nan=False)
    """Smallest value of the condition that lets a sample pass."""
    reward: Annotated[SerializeAsAny[Reward], AfterValidator(unweighted)]
    """The reward of samples that pass."""
    closed: float = Field(0.0, allow_inf_nan=False)
    """Value of samples that do not pass."""

    def children(self) -> tuple[Reward, ...]:
        return (self.condition, self.reward)

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        conditions = await ask(self.condition, prompt, samples)
        passing = [s for s, c in zip(samples, conditions, strict=True) if c.value >= self.at_least]
        scores = iter(await ask(self.reward, prompt, passing))
        return [self._score(c, next(scores) if c.value >= self.at_least else None) for c in conditions]

    def _score(self, condition: Score, score: Score | None) -> Score:
        parts = components(f"condition.{names([self.condition])[0]}", condition)
        if score is None:
            return Score(value=self.closed, components={**parts, "open": 0.0}, error=condition.error)
        parts |= components(names([self.reward])[0], score)
        return Score(value=score.value, components={**parts, "open": 1.0}, error=score.error)
