"""Rewards composed of other rewards."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from plasmid import Prompt, RecipeView, Reward, RunContext, Sample, Score
from plasmid.components import kind_of
from plasmid.components.reward_calls import call_reward, is_for_groups, sum_token_rewards
from plasmid.config.profiles import reward_names
from plasmid.errors import CheckpointError, RewardError
from plasmid.settings.trust import ACTIVE, INERT
from plasmid.utils.waiting import GRACE
from plasmid_sandbox import Limits
from plasmid_sandbox.worker import Work
from pydantic import AfterValidator, Field, SerializeAsAny

from .mathematics.boxed_text import find_last_boxed
from .pooled import InWorkers
from .scores import pack_scores


class Combined(Reward):
    """Base class of rewards that contain other rewards, which it opens, closes and saves.

    Scores all samples of a prompt together, so that child rewards can compare them.
    """

    timeout_s: float = Field(600.0, gt=0)
    """Time limit for one sample, in seconds; exceeding it ends the run with an error. Child rewards keep their own
    limits."""

    def limit_s(self, num_samples: int) -> float:
        return super().limit_s(num_samples) * GRACE  # so that a child's own limit expires first

    def children(self) -> list[Reward]:
        """Return the child rewards in the order of the settings."""
        values = [getattr(self, name) for name in type(self).model_fields]
        listed = [value if isinstance(value, tuple) else (value,) for value in values]
        return [child for children in listed for child in children if isinstance(child, Reward)]

    @abstractmethod
    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float | Score]:
        """Score all samples of one prompt."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float | Score:
        return (await self.score_group(prompt, [sample]))[0]

    async def open(self, context: RunContext) -> None:
        for child in self.children():
            await child.open(context)

    async def close(self) -> None:
        for child in self.children():
            await child.close()

    def state(self) -> Mapping[str, Any]:
        return {str(index): self._read_state(child) for index, child in enumerate(self.children())}

    def _read_state(self, child: Reward) -> dict[str, Any]:
        state: object = child.state()
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"reward {kind_of(child)!r} in {kind_of(self)!r}: its state must be a mapping, got {state!r:.100}"
            )
        return dict(state)

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


def check_unweighted(reward: Reward) -> Reward:
    """Return the reward; raise `ValueError` if it sets a weight, which would have no effect."""
    if reward.weight != 1.0:
        raise ValueError(describe_idle_weight(reward))
    return reward


def describe_idle_weight(reward: Reward) -> str:
    """Describe a weight that has no effect."""
    return f"weight = {reward.weight:g} of {kind_of(reward)!r} has no effect in a combined reward; remove it"


def check_unnamed(reward: Reward) -> Reward:
    """Return the reward; raise `ValueError` if it sets a weight or a name, which would have no effect."""
    if reward.name != "auto":
        raise ValueError(f"name = {reward.name!r} of {kind_of(reward)!r} has no effect in a combined reward; remove it")
    return check_unweighted(reward)


async def score_samples(
    reward: Reward, prompt: Prompt, samples: Sequence[Sample], *, catches_faults: bool = True
) -> list[Score]:
    """Score samples with a reward. Raises `RewardError` if it times out or returns anything but scores."""
    where, start = kind_of(reward), asyncio.ensure_future
    return await call_reward(reward, prompt, samples, where=where, start=start, catches_faults=catches_faults)


def flatten_components(name: str, score: Score) -> dict[str, float]:
    """Flatten a score into components of another score."""
    return {name: score.value, **{f"{name}.{part}": value for part, value in score.components.items()}}


class Aggregate(Combined):
    """Runs several rewards concurrently and combines their scores into one."""

    @abstractmethod
    def combine(self, scores: Sequence[Score]) -> float:
        """Compute the value of a sample from the scores of the children, in their order."""

    def combine_tokens(self, scores: Sequence[Score]) -> Mapping[int, float]:
        """Return `Score.token_rewards` of a sample; empty if the value is no sum of those of the children."""
        return {}

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        rewards = self.children()
        columns = await asyncio.gather(*(score_samples(reward, prompt, samples) for reward in rewards))
        return [self._score(row, reward_names(rewards)) for row in zip(*columns, strict=True)]

    def _score(self, scores: Sequence[Score], names: Sequence[str]) -> Score:
        named = zip(names, scores, strict=True)
        parts = {key: value for name, score in named for key, value in flatten_components(name, score).items()}
        value, errors = self.combine(scores), [score.error for score in scores if score.error]
        if math.isfinite(value):
            tokens = self.combine_tokens(scores)
            return Score(value=value, components=parts, error="; ".join(errors) or None, token_rewards=tokens)
        error = "; ".join([*errors, "the value is too large"])
        return Score(value=self.failure(), components=parts, error=error)


class Sum(Aggregate):
    """The weighted sum of several rewards. The list ``rewards`` of a recipe is summed without it."""

    kind: Literal["sum"] = "sum"
    rewards: tuple[SerializeAsAny[Reward], ...] = Field(min_length=1)
    """Rewards to add, each with its ``weight``."""

    def combine(self, scores: Sequence[Score]) -> float:
        return sum(reward.weight * score.value for reward, score in zip(self.rewards, scores, strict=True))

    def combine_tokens(self, scores: Sequence[Score]) -> Mapping[int, float]:
        return sum_token_rewards(zip([reward.weight for reward in self.rewards], scores, strict=True))


class Product(Aggregate):
    """The product of several rewards: a single 0 makes the product 0."""

    kind: Literal["product"] = "product"
    rewards: tuple[SerializeAsAny[Reward], ...] = Field(min_length=2)
    """The factors. Weights would only scale the product, so they are not allowed here."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        yield from (describe_idle_weight(reward) for reward in self.rewards if reward.weight != 1.0)

    def combine(self, scores: Sequence[Score]) -> float:
        return math.prod(score.value for score in scores)


class Gate(Combined):
    """`reward` if `condition` reaches `at_least`, else `closed`. Use it to require a format before the answer counts.

    The reward is not computed for samples that fail the condition.
    """

    kind: Literal["gate"] = "gate"
    condition: Annotated[SerializeAsAny[Reward], AfterValidator(check_unweighted)]
    """Reward that decides whether a sample passes."""
    at_least: float = Field(1.0, allow_inf_nan=False)
    """Minimum value of the condition for a sample to pass."""
    reward: Annotated[SerializeAsAny[Reward], AfterValidator(check_unweighted)]
    """Reward of samples that pass."""
    closed: float = Field(0.0, allow_inf_nan=False)
    """Value of samples that do not pass."""

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        conditions = await score_samples(self.condition, prompt, samples)
        passing = [s for s, c in zip(samples, conditions, strict=True) if c.value >= self.at_least]
        scores = iter(await score_samples(self.reward, prompt, passing))
        return [self._score(c, next(scores) if c.value >= self.at_least else None) for c in conditions]

    def _score(self, condition: Score, score: Score | None) -> Score:
        parts = flatten_components(f"condition.{reward_names([self.condition])[0]}", condition)
        if score is None:
            return Score(value=self.closed, components={**parts, "open": 0.0}, error=condition.error)
        parts |= flatten_components(reward_names([self.reward])[0], score)
        return replace(score, components={**parts, "open": 1.0})


class Part(Combined):
    """Uses the component `key` of another reward as the value. All components are still logged."""

    kind: Literal["part"] = "part"
    reward: Annotated[SerializeAsAny[Reward], AfterValidator(check_unnamed)]
    """Reward to compute."""
    key: Annotated[str, INERT]
    """Name of the component, for example ``accuracy`` of ``dapo``."""
    missing: float = Field(0.0, allow_inf_nan=False)
    """Value for samples on which the reward failed and that lack the component."""

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        return [self._score(score) for score in await score_samples(self.reward, prompt, samples)]

    def _score(self, score: Score) -> Score:
        if self.key not in score.components and score.error is None:
            has = ", ".join(score.components) or "none"
            raise RewardError(f"part: {kind_of(self.reward)!r} has no component {self.key!r}; its components are {has}")
        value = score.components.get(self.key, self.missing)
        return Score(value=value, components={**score.components, "value": score.value}, error=score.error)


class Boxed(Combined):
    r"""The score of another reward for the content of the last ``\boxed{...}``; `missing` for texts without a box."""

    kind: Literal["boxed"] = "boxed"
    reward: Annotated[SerializeAsAny[Reward], AfterValidator(check_unnamed)]
    """Reward that scores the content of the box."""
    missing: float = Field(0.0, allow_inf_nan=False)
    """Value of a text without a box."""

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        inside = [find_last_boxed(sample.text) for sample in samples]
        shown = [replace(s, text=text) for s, text in zip(samples, inside, strict=True) if text is not None]
        scores = iter(await score_samples(self.reward, prompt, shown))
        return [Score(value=self.missing, error="no box") if text is None else next(scores) for text in inside]


class Isolated(InWorkers):
    """Runs another reward in worker processes, for rewards that are slow, may hang or may crash.

    The reward is opened once in each worker. Each call runs in a forked copy of that process, which is then discarded,
    so a reward that accumulates state between calls does not work here.
    """

    kind: Literal["isolated"] = "isolated"
    reward: Annotated[SerializeAsAny[Reward], AfterValidator(check_unnamed)]
    """Reward to run."""
    failure_value: float = Field(0.0, allow_inf_nan=False)
    """Value of a sample on which the reward hangs, crashes, or exceeds its memory limit."""
    network: Annotated[bool, ACTIVE] = False
    """Allow network access."""
    processes: bool = False
    """Allow the reward to start processes. They are killed when the call ends."""
    opens_early: ClassVar[bool] = True
    _context: RunContext | None = None

    def failure(self) -> float:
        return self.failure_value

    def limits(self) -> Limits:
        variables = (*self.environment, *_find_variables(self.reward.model_dump()))
        return replace(super().limits(), network=self.network, processes=self.processes, environment=variables)

    def work(self) -> Work:
        return RewardWork(self.reward, self._context)

    async def open(self, context: RunContext) -> None:
        self._context = replace(context, engine=None)
        await super().open(context)

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        if is_for_groups(self.reward):
            return await self._score_in_worker(prompt, list(samples))
        return await asyncio.gather(*(self(prompt, sample) for sample in samples))


def _find_variables(settings: Any) -> Iterator[str]:
    """Find the environment variables that settings name, such as ``server.api_key_env``."""
    if isinstance(settings, Mapping):
        yield from (value for key, value in settings.items() if key.endswith("_env") and isinstance(value, str))
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for item in settings:
            yield from _find_variables(item)


@dataclass(frozen=True, slots=True)
class RewardWork:
    """Worker side of `Isolated`."""

    reward: Reward
    context: RunContext | None

    def warm(self) -> None:
        """Open the reward."""
        if self.context is not None:
            asyncio.run(self.reward.open(self.context))

    def prepare(self, given: tuple[Prompt, list[Sample]]) -> None:
        """Do nothing: the reward is not trusted to run outside of a call."""

    def answer(self, given: tuple[Prompt, list[Sample]]) -> list[Any]:
        """Score the samples."""
        prompt, samples = given
        return pack_scores(asyncio.run(score_samples(self.reward, prompt, samples, catches_faults=False)))
