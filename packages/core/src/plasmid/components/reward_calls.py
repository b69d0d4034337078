"""Calls of rewards: their deadlines, and what becomes of the answers that are no scores.

A sample can exceed the limits of Python (`errors.sample_fault`): it gets the reward's failure value. Everything else
that is not a finite score is a mistake of the reward and ends the run. docs/rewards.md says which is which.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import RewardError, one_line, sample_fault
from ..types import Prompt, Sample, Score
from ..utils.work_clock import WorkClock, finish_within, timed
from . import Reward

log = logging.getLogger(__name__)
Start = Callable[[Coroutine[Any, Any, Any]], "asyncio.Future[Any]"]
"""Starts a coroutine on the event loop where rewards run."""
Raised = Callable[[Exception, Sequence[Sample]], Exception]
"""Makes of an exception of a reward the one to raise; the samples are those of the call."""
MAX_COMPONENTS = 1000
"""Components of one score."""
MAX_NAME = 1000
"""Characters of a component's name."""
MAX_REASON = 1000
"""Characters of a reason that are kept."""


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
    """Scores of the samples. Raises `RewardError` that begins with ``where`` if the reward is broken or too slow.

    What else it raises is raised as ``raised`` turns it, or as it is; a sample's fault only without ``catches_faults``.
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
    """True if its scores depend on the other samples of the prompt."""
    return type(reward).score_group is not Reward.score_group


@dataclass(frozen=True, slots=True)
class _Call:
    """One reward, as it is called."""

    reward: Reward
    where: str
    start: Start
    raised: Raised | None
    catches_faults: bool

    async def scores(self, work: Callable[[], Any], samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample of a call, which is about a sample or a group."""
        clock = WorkClock()
        limit_s = self.reward.limit_s(len(samples))
        try:
            values = await finish_within(limit_s, self.start(timed(work, clock)), clock)
        except RewardError:
            raise
        except Exception as error:  # noqa: BLE001  boundary: rewards are users' code
            if isinstance(error, TimeoutError) and clock.seconds() >= limit_s:
                return [self._late(samples)] * len(samples)
            fault, value = self._fault(error, samples), self.reward.failure()
            log.warning("%s: %s: %s; the value is %g", self.where, named(samples), one_line(error), value)
            return [Score(value=value, error=fault)] * len(samples)
        if len(values) != len(samples):
            raise RewardError(f"{self.where}: score_group returned {len(values)} scores for {len(samples)} samples")
        return [self._as_score(value, sample) for value, sample in zip(values, samples, strict=True)]

    def _fault(self, error: Exception, samples: Sequence[Sample]) -> str:
        """What in a sample made the reward raise. Raises the error, or what ``raised`` makes of it, if nothing did."""
        fault = sample_fault(error) if self.catches_faults else None
        if fault is None:
            raise error if self.raised is None else self.raised(error, samples) from error
        return fault

    def _late(self, samples: Sequence[Sample]) -> Score:
        seconds = self.reward.timeout_s * len(samples)
        return self.reward.on_timeout(
            f"{self.where}: no score for {named(samples)} within timeout_s = {seconds:g}; make it faster, let it give "
            "up by itself, or raise timeout_s"
        )

    def _as_score(self, value: object, sample: Sample) -> Score:
        """The score in an answer. Raises `RewardError` if it is none."""
        score = value if isinstance(value, Score) else Score(value=value) if isinstance(value, int | float) else None
        if score is not None and isinstance(score.value, int | float):
            fault = "the score is too large a number" if is_too_large(score.value) else None
            fault = fault or components_fault(score.components)
            if fault is not None and not self.catches_faults:
                raise OverflowError(fault)
            if fault is not None:
                return Score(value=self.reward.failure(), error=fault)
            if math.isfinite(score.value):
                return replace(score, value=float(score.value))
        raise RewardError(
            f"{self.where}: must return a finite number or a Score, got {shown(value)} for sample {sample.id}"
        )


def named(samples: Sequence[Sample]) -> str:
    """The samples of a call, for messages."""
    first, last = samples[0], samples[-1]
    return f"sample {first.id}" if first is last else f"samples {first.id} to {last.id}"


def shown(value: object) -> str:
    """A value that is no score, on one short line."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def is_too_large(value: object) -> bool:
    """True for an integer that no float can hold."""
    try:
        return isinstance(value, int) and not math.isfinite(value)
    except OverflowError:
        return True


def components_fault(components: Mapping[str, object]) -> str | None:
    """Why these cannot be the components of a score; None if they can."""
    if len(components) > MAX_COMPONENTS:
        return f"{len(components)} components, at most {MAX_COMPONENTS} are kept"
    if any(len(name) > MAX_NAME or not name.isprintable() for name in components):
        return f"the name of a component is longer than {MAX_NAME} characters, or cannot be printed"
    if any(is_too_large(value) for value in components.values()):
        return "a component is too large a number"
    return None


def shortened(reason: str) -> str:
    """A reason of reasonable length, in characters that files take."""
    reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."
    return reason.encode(errors="replace").decode()
