"""How a reward asks the rewards that it holds."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from plasmid import Prompt, Reward, RunContext, Sample, Score
from plasmid.components.reward_calls import call_reward
from plasmid.config.profiles import reward_names
from plasmid.utils.waiting import GRACE
from pydantic import Field


class Combined(Reward):
    """Opens, closes and saves the rewards that it holds; scores all samples of a prompt at once, so that they may."""

    timeout_s: float = Field(600.0, gt=0)
    """Longest time for one sample; past it the run ends with an error. The rewards within keep their own limits."""

    def limit_s(self, num_samples: int) -> float:
        return super().limit_s(num_samples) * GRACE  # a limit within comes first

    @abstractmethod
    def children(self) -> tuple[Reward, ...]:
        """The rewards that it holds, in their order."""

    @abstractmethod
    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float | Score]:
        """Scores of all samples of one prompt."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float | Score:
        return (await self.score_group(prompt, [sample]))[0]

    async def open(self, context: RunContext) -> None:
        for child in self.children():
            await child.open(context)

    async def close(self) -> None:
        for child in self.children():
            await child.close()

    def state(self) -> Mapping[str, Any]:
        return {str(index): dict(child.state()) for index, child in enumerate(self.children())}

    def restore(self, state: Mapping[str, Any]) -> None:
        for index, child in enumerate(self.children()):
            if state[str(index)]:
                child.restore(state[str(index)])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        merged: dict[str, Any] = {}
        for index, child in enumerate(self.children()):
            found = [state[str(index)] for state in states if state[str(index)]]
            merged[str(index)] = dict(child.merge(found)) if found else {}
        return merged

    def in_order(self) -> bool:
        return any(child.in_order() for child in self.children())


def unweighted(reward: Reward) -> Reward:
    """The reward, after checking that it has no weight, which nothing would read."""
    if reward.weight != 1.0:
        raise ValueError(idle_weight(reward))
    return reward


def idle_weight(reward: Reward) -> str:
    """What is said of a weight that nothing would read."""
    return f"weight = {reward.weight:g} of {kind_of(reward)!r} has no effect in here; remove it"


def alone(reward: Reward) -> Reward:
    """The reward, after checking that it has neither weight nor name, which nothing would read."""
    if reward.name != "auto":
        raise ValueError(f"name = {reward.name!r} of {kind_of(reward)!r} has no effect in here; remove it")
    return unweighted(reward)


def kind_of(reward: Reward) -> str:
    """The name of a reward in recipes."""
    return str(type(reward).model_fields["kind"].default)


def names(rewards: Sequence[Reward]) -> list[str]:
    """Their names in components: kinds, numbered where one occurs twice, unless they have names of their own."""
    return reward_names(rewards)


async def ask(reward: Reward, prompt: Prompt, samples: Sequence[Sample], *, catches_faults: bool = True) -> list[Score]:
    """What a reward says of each sample. Raises `RewardError` if it is late, or says something else than a score."""
    where, start = kind_of(reward), asyncio.ensure_future
    return await call_reward(reward, prompt, samples, where=where, start=start, catches_faults=catches_faults)


def finite(value: float, reward: Reward, **fields: Any) -> Score:
    """A score with the value, or with the reward's failure value if it is too large a number."""
    if math.isfinite(value):
        return Score(value=value, **fields)
    reason = "; ".join(filter(None, (fields.pop("error", None), "the value is too large a number")))
    return Score(value=reward.failure(), error=reason, **fields)


def components(name: str, score: Score) -> dict[str, float]:
    """A score as parts of another one."""
    return {name: score.value, **{f"{name}.{part}": value for part, value in score.components.items()}}


def errors(scores: Sequence[Score]) -> str | None:
    """The reasons of several scores as one."""
    return "; ".join(score.error for score in scores if score.error) or None
