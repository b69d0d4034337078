"""Calls of rewards, with deadlines and handling of invalid results.

A sample can exceed Python's limits (`errors.sample_fault`) and then gets the reward's failure value. Anything else that
is not a finite score is a bug in the reward and ends the run. See docs/rewards.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..errors import RewardError, one_line, sample_fault
from ..types import Prompt, Sample, Score
from ..utils.work_clock import WorkClock, finish_within, run_timed
from . import Reward

log = logging.getLogger(__name__)
Start = Callable[[Coroutine[Any, Any, Any]], "asyncio.Future[Any]"]
"""Starts a coroutine on the event loop where rewards run."""
Raised = Callable[[Exception, Sequence[Sample]], Exception]
"""Converts an exception of a reward into the one to raise; the samples are those of the call."""
MAX_COMPONENTS = 1000
"""Maximum number of components of a score."""
MAX_NAME = 1000
"""Maximum length of a component's name, in characters."""
MAX_REASON = 1000
"""Length to which reasons are truncated, in characters."""


async def call_reward(
    reward: Reward,
    prompt: Prompt,
    samples: Sequence[Sample],
    *,
    where: str,
    start: Start,
    raised: Raised | None = None,
    catches_faults: bool = True,
) -> list[Score]:
    """Score the samples. Raises a `RewardError` that starts with ``where`` if the reward is invalid or too slow.

    Other exceptions of the reward are converted by ``raised``, if given, and raised. Faults of a sample become its
    score, unless ``catches_faults`` is false.
    """
    if not samples:
        return []
    call = _Call(reward, where, start, raised, catches_faults)
    if is_for_groups(reward):
        return await call.scores(lambda: reward.score_group(prompt, samples), samples)

    async def one(sample: Sample) -> Score:
        async def work() -> Sequence[object]:
            return [await reward(prompt, sample)]

        return (await call.scores(work, [sample]))[0]

    if reward.in_order():
        return [await one(sample) for sample in samples]
    return list(await asyncio.gather(*(one(sample) for sample in samples)))


def is_for_groups(reward: Reward) -> bool:
    """Return True if the reward's scores depend on the other samples of the prompt."""
    return type(reward).score_group is not Reward.score_group


@dataclass(frozen=True, slots=True)
class _Call:
    """A reward with the options of its calls."""

    reward: Reward
    where: str
    start: Start
    raised: Raised | None
    catches_faults: bool

    async def scores(self, work: Callable[[], Any], samples: Sequence[Sample]) -> list[Score]:
        """Run a call for one sample or a group, and return one score per sample."""
        clock = WorkClock()
        limit_s = self.reward.limit_s(len(samples))
        try:
            what = f"{self.where}: {describe_samples(samples)}"
            values = await finish_within(limit_s, self.start(run_timed(work, clock)), clock, what)
        except RewardError:
            raise
        except Exception as error:  # noqa: BLE001  boundary: rewards are users' code
            if isinstance(error, TimeoutError) and clock.seconds() >= limit_s:
                return [self._handle_timeout(samples)] * len(samples)
            fault, value = self._describe_fault(error, samples), self.reward.failure()
            log.warning("%s: %s: %s; the value is %g", self.where, describe_samples(samples), one_line(error), value)
            return [Score(value=value, error=fault)] * len(samples)
        if len(values) != len(samples):
            raise RewardError(f"{self.where}: score_group returned {len(values)} scores for {len(samples)} samples")
        return [self._as_score(value, sample) for value, sample in zip(values, samples, strict=True)]

    def _describe_fault(self, error: Exception, samples: Sequence[Sample]) -> str:
        """Describe the fault of the sample that made the reward raise. Re-raises errors that no sample caused."""
        fault = sample_fault(error) if self.catches_faults else None
        if fault is None:
            raise error if self.raised is None else self.raised(error, samples) from error
        return fault

    def _handle_timeout(self, samples: Sequence[Sample]) -> Score:
        seconds = self.reward.timeout_s * len(samples)
        return self.reward.on_timeout(
            f"{self.where}: no score for {describe_samples(samples)} within timeout_s = {seconds:g}; make the "
            "reward faster, or raise timeout_s"
        )

    def _as_score(self, value: object, sample: Sample) -> Score:
        """Convert a result into a score. Raises `RewardError` if it is not one."""
        try:
            return self._convert_numbers(value, sample)
        except OverflowError as error:
            if not self.catches_faults:
                raise
            return Score(value=self.reward.failure(), error=str(error))

    def _convert_numbers(self, value: object, sample: Sample) -> Score:
        """Convert a result into a score of Python floats. Raises `OverflowError` for faults that a text can cause."""
        score = value if isinstance(value, Score) else Score(value=value)  # type: ignore[arg-type]
        number = convert_number(score.value, "the score")
        if number is None:
            raise self._make_value_error(value, sample)
        for name, found in (("components", score.components), ("token_rewards", score.token_rewards)):
            if not isinstance(found, Mapping):
                raise self._make_error(f"{name} must be a mapping", found, sample)
        for name in score.components:
            if not isinstance(name, str):
                raise self._make_error("the name of a component must be a string", name, sample)
        fault = find_components_error(score.components)
        if fault is None:
            components = self._convert_components(score, sample)
            tokens = self._convert_token_rewards(score, sample)
            score = Score(value=number, components=components, error=score.error, token_rewards=tokens)
            fault = _find_position_error(score, sample)
        if fault is not None:
            raise OverflowError(fault)
        if not math.isfinite(number):
            raise self._make_value_error(value, sample)
        return score

    def _convert_components(self, score: Score, sample: Sample) -> dict[str, float]:
        components = {}
        for name, value in score.components.items():
            number = convert_number(value, "a component")
            if number is None or not math.isfinite(number):
                raise self._make_error(f"component {name!r} must be a finite number", value, sample)
            components[name] = number
        return components

    def _convert_token_rewards(self, score: Score, sample: Sample) -> dict[int, float]:
        rewards = {}
        for position, value in score.token_rewards.items():
            number = convert_number(value, "a reward of a token")
            if number is None:
                raise self._make_error(f"token_rewards must be finite numbers; at position {position!r}", value, sample)
            rewards[position] = number
        return rewards

    def _make_value_error(self, value: object, sample: Sample) -> RewardError:
        if isinstance(value, Score):
            return self._make_error("the value of a Score must be a finite number", value.value, sample)
        return self._make_error("must return a finite number or a Score", value, sample)

    def _make_error(self, expected: str, value: object, sample: Sample) -> RewardError:
        return RewardError(f"{self.where}: {expected}, got {format_value(value)} for sample {sample.id}")


def describe_samples(samples: Sequence[Sample]) -> str:
    """Name the samples of a call in messages."""
    first, last = samples[0], samples[-1]
    return f"sample {first.id}" if first is last else f"samples {first.id} to {last.id}"


def format_value(value: object) -> str:
    """Format an invalid score on one short line, with its type unless the value itself shows it."""
    text = repr(value)
    text = (text if len(text) <= 200 else f"{text[:200]} ...").replace("\n", " ")
    return text if value is None or type(value) is float else f"{text} ({type(value).__name__})"


def convert_number(value: object, what: str) -> float | None:
    """Convert a number, a numpy scalar, or an array or tensor without dimensions to a float; return None for others.

    Raises `OverflowError`, which starts with ``what``, if the number is too large for a float.
    """
    item = getattr(value, "item", None)
    if not isinstance(value, Real) and getattr(value, "shape", None) == () and callable(item):
        value = item()
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:
        raise OverflowError(f"{what} is too large for a float") from None


def find_components_error(components: Mapping[str, object]) -> str | None:
    """Return why these components are invalid, or None if they are valid."""
    if len(components) > MAX_COMPONENTS:
        return f"a score has at most {MAX_COMPONENTS} components, got {len(components)}"
    if any(len(name) > MAX_NAME or not name.isprintable() for name in components):
        return f"the name of a component is longer than {MAX_NAME} characters, or cannot be printed"
    return None


def _find_position_error(score: Score, sample: Sample) -> str | None:
    """Return why the rewards of tokens are invalid, or None if they are valid."""
    for position, value in score.token_rewards.items():
        if type(position) is not int or not 0 <= position < len(sample.token_ids):
            return f"token_rewards has position {position!r}, and the sample has {len(sample.token_ids)} tokens"
        if not math.isfinite(value):
            return f"token_rewards has {value!r} at position {position}; it must be finite"
    return None


def sum_token_rewards(parts: Iterable[tuple[float, Score]]) -> dict[int, float]:
    """Sum the `Score.token_rewards` of several scores of one sample, each multiplied by its weight."""
    found: dict[int, float] = {}
    for weight, score in parts:
        for position, value in score.token_rewards.items():
            found[position] = found.get(position, 0.0) + weight * value
    return found


def shorten(reason: str) -> str:
    """Truncate a reason and replace characters that cannot be encoded in files."""
    reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."
    return reason.encode(errors="replace").decode()
