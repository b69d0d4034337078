"""One component of another reward as the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from plasmid import Prompt, Reward, Sample, Score
from plasmid.errors import RewardError
from plasmid.settings.trust import INERT
from pydantic import AfterValidator, Field, SerializeAsAny

from .combined import Combined, alone, ask, kind_of


class Part(Combined):
    """The component `key` of what another reward returns, in place of its value; all components stay in the log."""

    kind: Literal["part"] = "part"
    reward: Annotated[SerializeAsAny[Reward], AfterValidator(alone)]
    """The reward that is asked."""
    key: Annotated[str, INERT]
    """Name of the component, such as ``accuracy`` of ``dapo``."""
    missing: float = Field(0.0, allow_inf_nan=False)
    """Value where the reward failed on a text and has no such component."""

    def children(self) -> tuple[Reward, ...]:
        return (self.reward,)

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        return [self._score(score) for score in await ask(self.reward, prompt, samples)]

    def _score(self, score: Score) -> Score:
        if self.key not in score.components and score.error is None:
            has = ", ".join(score.components) or "none"
            raise RewardError(f"part: {kind_of(self.reward)!r} has no component {self.key!r}; its components: {has}")
        value = score.components.get(self.key, self.missing)
        return Score(value=value, components={**score.components, "value": score.value}, error=score.error)
