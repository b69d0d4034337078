"""Any reward, run in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from plasmid import Prompt, Reward, RunContext, Sample, Score
from pydantic import AfterValidator, Field, SerializeAsAny

from ..isolation import Limits, PooledReward
from ..isolation.worker import Judge
from .asking import ask, is_for_groups, unweighted


class Isolated(PooledReward):
    """Runs another reward in worker processes, for rewards that compute for long, hang or crash.

    The reward is opened once in each worker, and each call is made in a copy of that process which is then thrown away:
    a reward that gathers state between calls does not belong in here.
    """

    kind: Literal["isolated"] = "isolated"
    reward: Annotated[SerializeAsAny[Reward], AfterValidator(unweighted)]
    """The reward to run."""
    failure_value: float = Field(0.0, allow_inf_nan=False)
    """Value of a sample on which the reward hangs, crashes, or takes too much memory."""
    network: bool = False
    """Let it reach the network."""
    processes: bool = False
    """Let it start processes; they are killed when the call ends."""
    _context: RunContext | None = None

    def judge(self, prompt: Prompt, text: str) -> float | Score:
        raise NotImplementedError("the worker holds IsolatedJudge")

    def failure(self) -> float:
        return self.failure_value

    def limits(self) -> Limits:
        return replace(super().limits(), network=self.network, processes=self.processes)

    def judge_in_worker(self) -> Judge:
        return IsolatedJudge(self.reward, self._context)

    async def open(self, context: RunContext) -> None:
        self._context = replace(context, engine=None)
        await super().open(context)

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        return (await self._ask(prompt, [sample]))[0]

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        if is_for_groups(self.reward):
            return await self._ask(prompt, list(samples))
        return await asyncio.gather(*(self(prompt, sample) for sample in samples))


@dataclass(frozen=True, slots=True)
class IsolatedJudge:
    """What a worker of `Isolated` holds."""

    reward: Reward
    context: RunContext | None

    def warm(self) -> None:
        """Open the reward."""
        if self.context is not None:
            asyncio.run(self.reward.open(self.context))

    def prepare(self, prompt: Prompt) -> None:
        """Nothing: the reward is not trusted to run outside of a call."""

    def judge_all(self, prompt: Prompt, samples: list[Sample]) -> list[float | Score]:
        """Ask the reward."""
        return [*asyncio.run(ask(self.reward, prompt, samples))]
