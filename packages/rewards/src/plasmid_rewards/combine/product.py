"""Several rewards multiplied."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from plasmid import Prompt, Reward, Sample, Score
from pydantic import Field, SerializeAsAny

from .combined import Combined, ask, components, errors, finite, idle_weight, names


class Product(Combined):
    """The product of several rewards: one that is 0 makes all 0."""

    kind: Literal["product"] = "product"
    rewards: tuple[SerializeAsAny[Reward], ...] = Field(min_length=2)
    """The factors. Weights would only scale the product, so they are not allowed here."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        yield from (idle_weight(reward) for reward in self.rewards if reward.weight != 1.0)

    def children(self) -> tuple[Reward, ...]:
        return self.rewards

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        columns = await asyncio.gather(*(ask(reward, prompt, samples) for reward in self.rewards))
        return [self._score(row) for row in zip(*columns, strict=True)]

    def _score(self, scores: Sequence[Score]) -> Score:
        pairs = zip(names(self.rewards), scores, strict=True)
        parts = {key: value for name, score in pairs for key, value in components(name, score).items()}
        return finite(math.prod(score.value for score in scores), self, components=parts, error=errors(scores))
