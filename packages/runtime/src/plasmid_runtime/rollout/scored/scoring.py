"""Rewards, run away from the event loop, each with a deadline."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from plasmid.components import Reward
from plasmid.components.reward_calls import call_reward, named, shortened
from plasmid.config.profiles import Profile, profile_of, reward_names
from plasmid.errors import RewardError, one_line, place_in_class
from plasmid.protocols import RunContext
from plasmid.types import Prompt, Sample, Score, StopReason
from plasmid.utils.work_clock import QueueingExecutor

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
        self._loop.set_default_executor(QueueingExecutor(thread_name_prefix="reward-threads"))
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
        where = self._where(reward)

        def raised(error: Exception, samples: Sequence[Sample]) -> RewardError:
            said = f"{where}: raised on {named(samples)}: {one_line(error)}{place_in_class(type(reward), error)}"
            return RewardError(f"{said}; {_quoted(samples)}")

        return await call_reward(reward, prompt, samples, where=where, start=self._elsewhere, raised=raised)

    def _elsewhere(self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def _where(self, reward: Reward) -> str:
        index = next(i for i, r in enumerate(self._rewards) if r is reward)
        return f"{self._table}.{index} ({self._names[index]})"

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
        if not math.isfinite(total):
            total = sum(self._rewards[index].weight * self._rewards[index].failure() for index in chosen)
            errors.append("the sum of the rewards is too large a number")
        return Score(value=total, components=components, error="; ".join(map(shortened, errors)) or None)


def _quoted(samples: Sequence[Sample], longest: int = 200) -> str:
    """What was to be scored, for whoever has to find out why it could not be."""
    text = samples[0].text
    cut = f" ... ({len(text)} characters)" if len(text) > longest else ""
    return f"the {'' if len(samples) == 1 else 'first '}text was {text[:longest]!r}{cut}"
