"""What a plugin subclasses to score samples and to choose groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ..errors import RewardError
from ..settings.trust import INERT
from ..types import Prompt, PromptGroup, Sample, Score
from .base import Component

if TYPE_CHECKING:
    from ..config.run import RunConfig


class Reward(Component, slot="rewards"):
    """Scores one sample. Called many times at once; scores may depend on other calls only if `in_order` says so."""

    reads_target: ClassVar[bool] = False
    """True if it compares with `Prompt.target`: prompts without one are then refused before the run."""
    name: Annotated[str, INERT] = Field("auto", pattern=r"^[A-Za-z0-9_.-]+$")
    """What metrics and profiles call it; ``auto`` is its kind, numbered where one occurs twice."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of this reward in the sum."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one sample, once its computation has begun; past it the run ends with an error."""

    @abstractmethod
    async def __call__(self, prompt: Prompt, sample: Sample) -> float | Score:
        """The score of ``sample``. What a policy may write must not raise: return the failure value instead."""

    def failure(self) -> float:
        """Value of a sample whose text exceeds what Python takes: a number of 10,000 digits, a nesting too deep, ..."""
        return 0.0

    def on_timeout(self, message: str) -> Score:
        """Score of a sample that has none after `limit_s`. Raises `RewardError`, which ends the run."""
        raise RewardError(message)

    def limit_s(self, num_samples: int) -> float:
        """Longest time for one call about so many samples, in seconds, time in queues not counted."""
        return self.timeout_s * num_samples

    def in_order(self) -> bool:
        """True if scores depend on the calls before: groups are then shown one by one, on-policy as they were drawn."""
        return False

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float | Score]:
        """Scores of all samples of one prompt; override it where a score depends on the other samples."""
        return [await self(prompt, sample) for sample in samples]


class Filter(Component, slot="filters"):
    """Decides whether a scored group is trained on."""

    @property
    def reason(self) -> str:
        """What the groups that it drops are counted under: ``rollout/dropped/<reason>``."""
        return str(type(self).model_fields["kind"].default)

    def mistakes(self, config: RunConfig) -> Iterator[str]:
        """What these settings say that does not fit the rest of the recipe, one ``<key>: ...`` each."""
        yield from ()

    @abstractmethod
    def __call__(self, group: PromptGroup) -> bool:
        """True to keep the group."""
