"""Base classes of rewards and filters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from ..errors import RewardDeadlineError
from ..settings.trust import INERT
from ..types import Prompt, PromptGroup, Sample, Score
from .base import Component, kind_of


class Reward(Component, slot="rewards"):
    """Scores one sample. Calls run concurrently; scores may depend on earlier calls only if `in_order` returns True."""

    reads_target: ClassVar[bool] = False
    """True if the reward reads `Prompt.target`. Prompts without a target are then rejected before the run."""
    opens_early: ClassVar[bool] = False
    """True if `open` does not use `RunContext.engine`, so that it can be called while the engine starts. A subclass
    that overrides `open` must set it again."""
    name: Annotated[str, INERT] = Field("auto", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in metrics and profiles; ``auto`` is the kind, numbered if it occurs more than once."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Weight of this reward in the sum."""
    timeout_s: float = Field(60.0, gt=0)
    """Maximum time to compute one sample's score, in seconds, excluding time in queues; exceeding it ends the run."""

    @abstractmethod
    async def __call__(self, prompt: Prompt, sample: Sample) -> float | Score:
        """Score ``sample``. Must not raise for any text of the policy; return the failure value instead."""

    def failure(self) -> float:
        """Return the score of a sample that exceeds Python's limits, such as a number of 10,000 digits."""
        return 0.0

    def on_timeout(self, message: str) -> Score:
        """Return the score of a sample that exceeded `limit_s`. By default ends the run with an error."""
        raise RewardDeadlineError(message)

    def limit_s(self, num_samples: int) -> float:
        """Return the maximum time for a call with this number of samples, in seconds, not counting time in queues."""
        return self.timeout_s * num_samples

    def in_order(self) -> bool:
        """Return True if scores depend on earlier calls.

        Groups are then scored one at a time, and with on-policy sampling in the order of their draws.
        """
        return False

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float | Score]:
        """Score all samples of one prompt. Override this if a score depends on the other samples."""
        return [await self(prompt, sample) for sample in samples]


class Filter(Component, slot="filters"):
    """Decides whether a scored group is trained on."""

    @property
    def reason(self) -> str:
        """Suffix of the metric that counts dropped groups: ``rollout/dropped/<reason>``."""
        return kind_of(self)

    @abstractmethod
    def __call__(self, group: PromptGroup) -> bool:
        """Return True to keep the group."""
