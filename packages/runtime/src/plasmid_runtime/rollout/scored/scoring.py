"""Run rewards on a separate thread, with deadlines."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import pluggy
from plasmid.components import Reward
from plasmid.components.reward_calls import call_reward, describe_samples, shorten, sum_token_rewards
from plasmid.config.profiles import Profile, profile_of, reward_names
from plasmid.errors import PluginError, RewardError, locate_in_class, one_line
from plasmid.protocols import RunContext
from plasmid.types import Prompt, Sample, Score, StopReason
from plasmid.utils.waiting import serve_loop
from plasmid.utils.waits.stacks import LOOPS
from plasmid.utils.work_clock import QueueingExecutor
from plasmid_workflows.result_checks import find_sample_error

MAY_CHANGE = ("loss_mask", "text", "metadata", "stop_reason")
"""Fields of a sample that a plugin may change; generated tokens and their log-probabilities are fixed."""


class SampleHooks:
    """Calls the `sample_generated` hooks of all plugins, in the order in which they were loaded."""

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._implementations = plugins.hook.sample_generated.get_hookimpls()

    def apply(self, sample: Sample, prompt: Prompt) -> Sample:
        """Return the sample as changed by the plugins. Raises `PluginError` for changes that are not allowed."""
        for implementation in self._implementations:
            given: dict[str, Any] = {"sample": sample, "prompt": prompt}
            where = f"plugin {implementation.plugin_name!r}: sample_generated"
            try:
                answer: Any = implementation.function(*(given[name] for name in implementation.argnames))
            except Exception as error:  # boundary: plugins are users' code
                raise PluginError(f"{where} raised on sample {sample.id}: {one_line(error)}") from error
            if answer is not None:
                for mistake in _find_errors(sample, answer):
                    raise PluginError(f"{where} {mistake}")
                sample = answer
        return sample


def _find_errors(before: Sample, after: Any) -> Iterator[str]:
    if not isinstance(after, Sample):
        yield f"must return a Sample or None, got {after!r:.100} for sample {before.id}"
        return
    for field in fields(Sample):
        if field.name not in MAY_CHANGE and not _same(getattr(before, field.name), getattr(after, field.name)):
            allowed = ", ".join(MAY_CHANGE)
            yield f"changed {field.name} of sample {before.id}; it may change {allowed} (a reward belongs in a Reward)"
    if len(after.loss_mask) == len(before.loss_mask) and (after.loss_mask & ~before.loss_mask).any():
        yield f"added tokens of sample {before.id} to the loss; it may only remove tokens from the loss"
    if (mistake := find_sample_error(after)) is not None:
        yield f"must return a valid sample: {mistake}"


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, np.ndarray):
        return before is after or np.array_equal(before, after)
    return before is after or bool(before == after)


T = TypeVar("T")
CLOSE_S = 1.0
"""Maximum time for a reward to close, in seconds."""
log = logging.getLogger(__name__)


def opens_early(reward: type[Reward]) -> bool:
    """Return `Reward.opens_early`, or False if a subclass of the class that declares it has its own `open`."""
    found = next(vars(cls) for cls in reward.__mro__ if not vars(cls).keys().isdisjoint(("open", "opens_early")))
    return bool(found.get("opens_early"))


class Scorer:
    """Scores samples with the weighted sum of a recipe's rewards.

    Rewards run in a separate thread with its own event loop. A reward that blocks therefore delays neither requests to
    the engine nor its own timeout, whose error names the reward.
    """

    def __init__(
        self, rewards: Sequence[Reward], *, where: str = "rewards", profiles: Mapping[str, Profile] | None = None
    ) -> None:
        """``where`` is the recipe table of the rewards, for messages; ``profiles`` select among the rewards."""
        self._rewards = tuple(rewards)
        self._table = where
        self._names = reward_names(rewards)
        self._profiles = profiles or {}
        self._opened: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(QueueingExecutor(thread_name_prefix="reward-threads"))
        LOOPS.add(self._loop)
        threading.Thread(target=serve_loop, args=(self._loop,), name="rewards", daemon=True).start()

    async def open(self, context: RunContext, *, early: bool = False) -> None:
        """Open every reward that is not open; with ``early``, only those that need no engine."""
        for index, reward in enumerate(self._rewards):
            if index not in self._opened and (not early or opens_early(type(reward))):
                await self._submit(reward.open(context))
                self._opened.add(index)

    @property
    def in_order(self) -> bool:
        """True if groups must be scored one after another."""
        return any(reward.in_order() for reward in self._rewards)

    async def run_on_thread(self, function: Callable[[], Any]) -> Any:
        """Call a function on the thread of the rewards."""

        async def call() -> Any:
            return function()

        return await self._submit(call())

    async def close(self) -> None:
        """Close every reward and end the thread. Does not wait for a blocked reward: it may be why the run ends."""
        for reward in self._rewards:
            try:
                await asyncio.wait_for(self._submit(reward.close()), CLOSE_S)
            except TimeoutError:
                log.warning("%s did not close within %g s", self._where(reward), CLOSE_S)
                break
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with scores. Failed rollouts score 0 without calling any reward.

        Raises `RewardError` if a reward raises or takes longer than its ``timeout_s``.
        """
        shown = [sample for sample in samples if sample.stop_reason is not StopReason.ERROR]
        started = time.monotonic()
        parts: list[list[Score]] = []
        timings: dict[str, float] = {}
        chosen = self._choose_rewards(prompt)
        for index in chosen if shown else ():
            name, reward = self._names[index], self._rewards[index]
            begun = time.monotonic()
            parts.append(await self._score(reward, prompt, shown))
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

    async def _score(self, reward: Reward, prompt: Prompt, samples: Sequence[Sample]) -> list[Score]:
        where = self._where(reward)

        def convert(error: Exception, samples: Sequence[Sample]) -> RewardError:
            place = locate_in_class(type(reward), error)
            message = f"{where}: raised on {describe_samples(samples)}: {one_line(error)}{place}"
            return RewardError(f"{message}; {_quote(samples)}")

        return await call_reward(reward, prompt, samples, where=where, start=self._submit, raised=convert)

    def _submit(self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def _where(self, reward: Reward) -> str:
        index = next(i for i, r in enumerate(self._rewards) if r is reward)
        return f"{self._table}.{index} ({self._names[index]})"

    def _choose_rewards(self, prompt: Prompt) -> list[int]:
        """Return the indices of the rewards that score the samples of a prompt."""
        names = profile_of(prompt, self._profiles).rewards if self._profiles else "all"
        return [index for index, name in enumerate(self._names) if names == "all" or name in names]

    def _sum(self, chosen: Sequence[int], scores: Sequence[Score]) -> Score:
        total = 0.0
        components: dict[str, float] = {}
        weights = [self._rewards[index].weight for index in chosen]
        for index, score in zip(chosen, scores, strict=True):
            reward, name = self._rewards[index], self._names[index]
            total += reward.weight * score.value
            components[name] = score.value
            components |= {f"{name}.{part}": value for part, value in score.components.items()}
        tokens = sum_token_rewards(zip(weights, scores, strict=True))
        errors = [score.error for score in scores if score.error]
        if not all(map(math.isfinite, (total, *tokens.values()))):
            total = sum(self._rewards[index].weight * self._rewards[index].failure() for index in chosen)
            errors.append("the sum of the rewards is too large for a float")
            tokens = {}
        error = "; ".join(map(shorten, errors)) or None
        return Score(value=total, components=components, error=error, token_rewards=tokens)


def _quote(samples: Sequence[Sample], longest: int = 200) -> str:
    """Quote the text that could not be scored, for error messages."""
    text = samples[0].text
    cut = f" ... ({len(text)} characters)" if len(text) > longest else ""
    return f"the {'' if len(samples) == 1 else 'first '}text was {text[:longest]!r}{cut}"
