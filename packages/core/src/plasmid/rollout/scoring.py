"""Rewards, run away from the event loop, each with a deadline."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..components import Reward
from ..errors import RewardError, line_in, one_line
from ..profiles import Profile, profile_of, reward_names
from ..protocols import RunContext
from ..types import Prompt, Sample, Score, StopReason

T = TypeVar("T")
CLOSE_S = 1.0
"""Time that a reward has to close."""
log = logging.getLogger(__name__)


class Scorer:
    """Opens the rewards of a recipe and scores samples with their weighted sum.

    Rewards run on a thread with an event loop of its own: one that blocks stalls neither the engine's requests nor the
    deadline that ends the run with the reward's name.
    """

    def __init__(
        self, rewards: Sequence[Reward], *, where: str = "rewards", profiles: Mapping[str, Profile] | None = None
    ) -> None:
        """``where`` is the table of the recipe that lists them, for messages; ``profiles`` choose among them."""
        self._rewards = tuple(rewards)
        self._table = where
        self._names = reward_names(rewards)
        self._profiles = profiles or {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()

    async def open(self, context: RunContext) -> None:
        """Open every reward."""
        for reward in self._rewards:
            await self._elsewhere(reward.open(context))

    @property
    def in_order(self) -> bool:
        """True if groups must be scored one after another."""
        return any(reward.in_order() for reward in self._rewards)

    async def on_thread(self, function: Callable[[], Any]) -> Any:
        """Call a function where the rewards run, between two of their steps."""

        async def call() -> Any:
            return function()

        return await self._elsewhere(call())

    async def close(self) -> None:
        """Close every reward and end the thread. One that blocks is not waited for: it may be why the run ends."""
        for reward in self._rewards:
            try:
                await asyncio.wait_for(self._elsewhere(reward.close()), CLOSE_S)
            except TimeoutError:
                log.warning("%s did not close within %g s", self._where(reward), CLOSE_S)
                break
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their scores. A failed rollout is not shown to any reward and scores 0.

        Raises `RewardError` if a reward raises or takes longer than its ``timeout_s``.
        """
        shown = [sample for sample in samples if sample.stop_reason is not StopReason.ERROR]
        started = time.monotonic()
        parts: list[list[Score]] = []
        timings: dict[str, float] = {}
        chosen = self._chosen(prompt)
        for index in chosen if shown else ():
            name, reward = self._names[index], self._rewards[index]
            begun = time.monotonic()
            parts.append(await self._ask(reward, prompt, shown))
            timings[f"score_s/{name}"] = time.monotonic() - begun
        timings["score_s"] = time.monotonic() - started
        scored = iter(range(len(shown)))
        result = []
        for sample in samples:
            if sample.stop_reason is StopReason.ERROR:
                result.append(replace(sample, score=Score(value=0.0, error=sample.error)))
                continue
            at = next(scored)
            score = self._sum(chosen, [part[at] for part in parts])
            result.append(replace(sample, score=score, timings={**sample.timings, **timings}))
        return result

    async def _ask(self, reward: Reward, prompt: Prompt, samples: Sequence[Sample]) -> list[Score]:
        if type(reward).score_group is not Reward.score_group:
            values = await self._guard(reward, reward.score_group(prompt, samples), samples)
            if len(values) != len(samples):
                raise RewardError(
                    f"{self._where(reward)}: score_group returned {len(values)} scores for {len(samples)} samples"
                )
        elif reward.in_order():
            values = [await self._guard(reward, reward(prompt, sample), [sample]) for sample in samples]
        else:
            calls = [self._guard(reward, reward(prompt, sample), [sample]) for sample in samples]
            values = await asyncio.gather(*calls)
        return [self._checked(reward, value, sample) for value, sample in zip(values, samples, strict=True)]

    async def _guard(self, reward: Reward, call: Coroutine[Any, Any, T], samples: Sequence[Sample]) -> T:
        limit = reward.timeout_s * len(samples)
        first, last = samples[0], samples[-1]
        who = f"sample {first.id}" if first is last else f"samples {first.id} to {last.id}"
        try:
            return await asyncio.wait_for(self._elsewhere(call), limit)
        except TimeoutError:
            raise RewardError(
                f"{self._where(reward)}: no score for {who} within timeout_s = {limit:g}; make it faster, "
                "let it give up by itself, or raise timeout_s"
            ) from None
        except RewardError:
            raise
        except Exception as error:  # boundary: rewards are users' code
            said = f"{self._where(reward)}: raised on {who}: {one_line(error)}{_line_of(reward, error)}"
            raise RewardError(f"{said}; {_quoted(samples)}") from error

    def _elsewhere(self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def _where(self, reward: Reward) -> str:
        index = next(i for i, r in enumerate(self._rewards) if r is reward)
        return f"{self._table}.{index} ({self._names[index]})"

    def _checked(self, reward: Reward, value: object, sample: Sample) -> Score:
        score = value if isinstance(value, Score) else None
        if score is None and isinstance(value, int | float):
            score = Score(value=float(value))
        if score is None or score.value != score.value or abs(score.value) == float("inf"):
            raise RewardError(
                f"{self._where(reward)}: must return a finite number or a Score, got {value!r} for sample {sample.id}"
            )
        return score

    def _chosen(self, prompt: Prompt) -> list[int]:
        """Which rewards judge the samples of a prompt."""
        names = profile_of(prompt, self._profiles).rewards if self._profiles else "all"
        return [index for index, name in enumerate(self._names) if names == "all" or name in names]

    def _sum(self, chosen: Sequence[int], scores: Sequence[Score]) -> Score:
        total = 0.0
        components: dict[str, float] = {}
        for index, score in zip(chosen, scores, strict=True):
            reward, name = self._rewards[index], self._names[index]
            total += reward.weight * score.value
            components[name] = score.value
            components |= {f"{name}.{part}": value for part, value in score.components.items()}
        errors = [score.error for score in scores if score.error]
        return Score(value=total, components=components, error="; ".join(errors) or None)


def _line_of(reward: Reward, error: Exception) -> str:
    """Where in the reward's own file an error came from."""
    file = getattr(sys.modules.get(type(reward).__module__), "__file__", None)
    line = line_in(file, error) if file else None
    return f" ({Path(file).name}:{line})" if file and line else ""


def _quoted(samples: Sequence[Sample], longest: int = 200) -> str:
    """What was to be scored, for whoever has to find out why it could not be."""
    text = samples[0].text
    cut = f" ... ({len(text)} characters)" if len(text) > longest else ""
    return f"the {'' if len(samples) == 1 else 'first '}text was {text[:longest]!r}{cut}"
