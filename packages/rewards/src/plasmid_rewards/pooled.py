"""Bases of rewards whose work is heavy, or whose code is not trusted with what a policy writes."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from plasmid import Prompt, Reward, RunContext, Sample, Score
from plasmid.errors import IsolationError, RewardError
from plasmid_sandbox import BatchPool, Limits, WorkerPool
from plasmid_sandbox.worker import Work
from pydantic import Field, PrivateAttr

from .scores import pack_scores, unpack_scores

WORKER_S = 180.0
"""Time beyond `call_timeout_s` in which a pool starts a worker, and has given up one that does not answer."""
EMPTY = np.zeros(0, np.int32)


class InWorkers(Reward):
    """Works in worker processes: a call that hangs, crashes or eats memory gets the failure value and a reason."""

    timeout_s: float = Field(600.0, gt=0)
    """Longest time for one sample, once a worker takes it; at least a minute longer than `call_timeout_s`."""
    workers: Literal["auto"] | int = "auto"
    """Worker processes; ``auto`` is one for each core, at most 8."""
    call_timeout_s: float = Field(10.0, gt=0)
    """Longest time for judging one sample; past it the sample gets the failure value."""
    memory_mb: int = Field(1024, ge=16)
    """Memory that judging one sample may take, in MiB."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the worker processes get. They have paths, the locale and the settings of
    Python and of the Hugging Face caches anyway, and no other: no keys."""
    batched: ClassVar[bool] = False
    """Whether a process judges many samples, one after another, which is many times faster. Only for rewards that never
    execute what a sample says: such code could change what the process answers to the samples after it."""
    _pool: WorkerPool | None = PrivateAttr(None)

    def model_post_init(self, context: object, /) -> None:
        if isinstance(self.workers, int) and self.workers < 1:
            raise ValueError(f"workers must be 'auto' or at least 1, got {self.workers}")
        super().model_post_init(context)

    @abstractmethod
    def work(self) -> Work:
        """What the workers hold. It is called with a prompt and samples, and answers with `pack_scores`."""

    def failure(self) -> float:
        """What a sample gets that could not be judged."""
        return 0.0

    def limit_s(self, num_samples: int) -> float:
        return max(super().limit_s(num_samples), self.call_timeout_s + WORKER_S)

    def limits(self) -> Limits:
        """What one call may use."""
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
        except IsolationError as error:
            raise RewardError(str(error)) from None
        scores = answer.failed if answer.failed is not None else unpack_scores(answer.value, len(samples))
        if isinstance(scores, str):
            return [Score(value=self.failure(), error=scores) for _ in samples]
        return scores

    def _worker_pool(self) -> WorkerPool:
        if self._pool is None:
            workers = min(os.cpu_count() or 1, 8) if self.workers == "auto" else self.workers
            pool = BatchPool if self.batched else WorkerPool
            self._pool = pool(self.work(), self.limits(), workers=workers)
        return self._pool


class PooledReward(InWorkers):
    """A reward of the text alone, judged in worker processes."""

    @abstractmethod
    def judge(self, prompt: Prompt, text: str) -> float | Score:
        """The score of a text. Runs in a worker process."""

    def warm(self) -> None:
        """Import what `judge` needs, once in each worker. Raises `RewardError` if it is not installed."""

    def prepare(self, prompt: Prompt) -> None:
        """Make what many texts of one prompt can share."""

    def work(self) -> Work:
        # without its pool, which stays here
        return Judging(type(self).model_construct(**dict(self)))

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        return (await self._score_in_worker(light(prompt), [light_sample(sample)]))[0]


@dataclass(frozen=True, slots=True)
class Judging:
    """What a worker of a `PooledReward` holds."""

    reward: PooledReward

    def warm(self) -> None:
        """Import what the reward needs."""
        self.reward.warm()

    def prepare(self, given: tuple[Prompt, list[Sample]]) -> None:
        """Make what many texts of the prompt can share."""
        self.reward.prepare(given[0])

    def answer(self, given: tuple[Prompt, list[Sample]]) -> list[Any]:
        """Judge the texts."""
        prompt, samples = given
        return pack_scores([self.reward.judge(prompt, sample.text) for sample in samples])


def light(prompt: Prompt) -> Prompt:
    """The prompt without its tokens, which judges of texts have no use for."""
    return replace(prompt, token_ids=EMPTY)


def light_sample(sample: Sample) -> Sample:
    """The sample without its arrays."""
    return replace(
        sample,
        token_ids=EMPTY,
        loss_mask=np.zeros(0, np.bool_),
        rollout_logprobs=np.zeros(0, np.float32),
        versions=(),
        kept=None,
    )
