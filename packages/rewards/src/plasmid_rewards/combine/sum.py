"""A weighted sum, for use inside other rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from plasmid import Prompt, Reward, Sample, Score
from pydantic import Field, SerializeAsAny

from .combined import Combined, ask, components, errors, finite, names


class Sum(Combined):
    """The sum of several rewards, each times its own weight. The list ``rewards`` of a recipe is summed already."""

    kind: Literal["sum"] = "sum"
    rewards: tuple[SerializeAsAny[Reward], ...] = Field(min_length=1)
    """The rewards, each with its ``weight``."""

    def children(self) -> tuple[Reward, ...]:
        return self.rewards

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        columns = await asyncio.gather(*(ask(reward, prompt, samples) for reward in self.rewards))
        return [self._score(row) for row in zip(*columns, strict=True)]

    def _score(self, scores: Sequence[Score]) -> Score:
        pairs = list(zip(names(self.rewards), scores, strict=True))
        parts = {key: value for name, score in pairs for key, value in components(name, score).items()}
        value = sum(reward.weight * score.value for reward, score in zip(self.rewards, scores, strict=True))
        return finite(value, self, components=parts, error=errors(scores))
