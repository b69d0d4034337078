"""Base classes of rewards that are expensive or that must not run generated text in this process."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from plasmid import Prompt, RecipeView, Reward, RunContext, Sample, Score
from plasmid.components import kind_of
from plasmid.errors import IsolationError, RaisedError, RewardError
from plasmid_sandbox import BatchPool, Limits, WorkerPool
from plasmid_sandbox.pool import Answer
from plasmid_sandbox.worker import Work
from pydantic import Field, PrivateAttr

from .scores import pack_scores, unpack_scores

log = logging.getLogger(__name__)
WORKER_S = 180.0
"""Allowance for starting a worker and for giving up one that does not answer, in seconds beyond `call_timeout_s`."""
EMPTY = np.zeros(0, np.int32)


class InWorkers(Reward):
    """Base class of rewards that run in worker processes.

    If a call hangs, crashes or exceeds its memory limit, its samples get the failure value and the reason.
    """

    timeout_s: float = Field(600.0, gt=0)
    """Time limit for one sample once a worker takes it, in seconds; at least `call_timeout_s` plus three minutes."""
    workers: Literal["auto"] | int = "auto"
    """Number of worker processes; ``auto`` is one per core, at most 8."""
    call_timeout_s: float = Field(10.0, gt=0)
    """Time limit for judging one sample, in seconds. Beyond it the sample gets the failure value."""
    memory_mb: int = Field(1024, ge=16)
    """Memory limit for judging one sample, in MiB."""
    environment: tuple[str, ...] = ()
    """Names of environment variables to pass to the worker processes. Paths, the locale and the settings of Python
    and of the Hugging Face caches are always passed; nothing else is, in particular no keys."""
    opens_early: ClassVar[bool] = True
    batched: ClassVar[bool] = False
    """Whether one process judges many samples in sequence, which is many times faster. Only for rewards that never
    execute generated text: such code could change the process's answers to later samples."""
    _pool: WorkerPool | None = PrivateAttr(None)
    _has_warned: bool = PrivateAttr(False)

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if isinstance(self.workers, int) and self.workers < 1:
            yield f"workers must be 'auto' or at least 1, got {self.workers}"

    @abstractmethod
    def work(self) -> Work:
        """Return the work of the workers. It receives a prompt and samples, and answers with `pack_scores`."""

    def failure(self) -> float:
        """Return the value of a sample that could not be judged."""
        return 0.0

    def limit_s(self, num_samples: int) -> float:
        return max(super().limit_s(num_samples), self.call_timeout_s + WORKER_S)

    def limits(self) -> Limits:
        """Return the limits of one call."""
        return Limits(timeout_s=self.call_timeout_s, memory_mb=self.memory_mb, environment=self.environment)

    async def open(self, context: RunContext) -> None:
        try:
            await self._worker_pool().start()
        except IsolationError as error:
            raise RewardError(str(error)) from None

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        return (await self._score_in_worker(prompt, [sample]))[0]

    async def _score_in_worker(self, prompt: Prompt, samples: list[Sample]) -> list[Score]:
        try:
            answer = await self._worker_pool().call((prompt, samples))
        except RaisedError as error:
            answer = await self._explain(prompt, samples, error)
        except IsolationError as error:  # a fault of the machine, not of the sample
            raise RewardError(str(error)) from None
        scores = answer.failed if answer.failed is not None else unpack_scores(answer.value, len(samples))
        if isinstance(scores, str):
            return [Score(value=self.failure(), error=scores) for _ in samples]
        return scores

    async def _explain(self, prompt: Prompt, samples: list[Sample], error: IsolationError) -> Answer:
        """Handle an exception from a process. Raises `RewardError` if the reward itself is broken.

        Executed text can forge such an exception. The call is therefore repeated with empty texts: if it raises again,
        the reward is broken.
        """
        if not self.batched:
            try:
                await self._worker_pool().call((prompt, [replace(sample, text="") for sample in samples]))
                self._warn_once(str(error))
                return Answer(failed=str(error))
            except IsolationError as broken:
                error = broken
        raise RewardError(str(error)) from None

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            reason = " ".join(reason.split())
            log.warning("reward %s: %.300s; such samples get %g (logged once)", kind_of(self), reason, self.failure())

    def _worker_pool(self) -> WorkerPool:
        if self._pool is None:
            pool = BatchPool if self.batched else WorkerPool
            self._pool = pool(self.work(), self.limits(), workers=self.workers)
        return self._pool


class PooledReward(InWorkers):
    """A reward that depends only on the text, judged in worker processes."""

    @abstractmethod
    def judge(self, prompt: Prompt, text: str) -> float | Score:
        """Score a text. Runs in a worker process."""

    def judge_quickly(self, prompt: Prompt, text: str) -> float | Score | None:
        """Score a text in this process if that takes less than a call of a worker; return None to call one.

        Runs without limits of time and memory, so it must be fast and small for every text.
        """
        return None

    def warm(self) -> None:
        """Import what `judge` needs, once in each worker. Raises `RewardError` if it is not installed."""

    def prepare(self, prompt: Prompt) -> None:
        """Prepare what many texts of one prompt can share."""

    def work(self) -> Work:
        # without the pool, which stays in this process
        return JudgeWork(type(self).model_construct(**dict(self)))

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        quick = self.judge_quickly(prompt, sample.text)
        if quick is not None:
            return quick if isinstance(quick, Score) else Score(value=quick)
        return (await self._score_in_worker(strip_prompt(prompt), [strip_sample(sample)]))[0]


@dataclass(frozen=True, slots=True)
class JudgeWork:
    """Worker side of a `PooledReward`."""

    reward: PooledReward

    def warm(self) -> None:
        """Import what the reward needs."""
        self.reward.warm()

    def prepare(self, given: tuple[Prompt, list[Sample]]) -> None:
        """Prepare what many texts of the prompt can share."""
        self.reward.prepare(given[0])

    def answer(self, given: tuple[Prompt, list[Sample]]) -> list[Any]:
        """Judge the texts."""
        prompt, samples = given
        return pack_scores([self.reward.judge(prompt, sample.text) for sample in samples])


def strip_prompt(prompt: Prompt) -> Prompt:
    """Return the prompt without its tokens, which text judges do not need."""
    return replace(prompt, token_ids=EMPTY)


def strip_sample(sample: Sample) -> Sample:
    """Return the sample without its arrays."""
    return replace(
        sample,
        token_ids=EMPTY,
        loss_mask=np.zeros(0, np.bool_),
        rollout_logprobs=np.zeros(0, np.float32),
        versions=(),
        kept=None,
    )
