"""Any reward, run in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from plasmid import Prompt, Reward, RunContext, Sample, Score
from plasmid.components.reward_calls import is_for_groups
from plasmid.settings.trust import ACTIVE
from plasmid_sandbox import Limits
from plasmid_sandbox.worker import Work
from pydantic import AfterValidator, Field, SerializeAsAny

from ..pooled import InWorkers
from ..scores import pack_scores
from .combined import alone, ask


class Isolated(InWorkers):
    """Runs another reward in worker processes, for rewards that compute for long, hang or crash.

    The reward is opened once in each worker, and each call is made in a copy of that process which is then thrown away:
    a reward that gathers state between calls does not belong in here.
    """

    kind: Literal["isolated"] = "isolated"
    reward: Annotated[SerializeAsAny[Reward], AfterValidator(alone)]
    """The reward to run."""
    failure_value: float = Field(0.0, allow_inf_nan=False)
    """Value of a sample on which the reward hangs, crashes, or takes too much memory."""
    network: Annotated[bool, ACTIVE] = False
    """Let it reach the network."""
    processes: bool = False
    """Let it start processes; they are killed when the call ends."""
    _context: RunContext | None = None

    def failure(self) -> float:
        return self.failure_value

    def limits(self) -> Limits:
        variables = (*self.environment, *_named_variables(self.reward.model_dump()))
        return replace(super().limits(), network=self.network, processes=self.processes, environment=variables)

    def work(self) -> Work:
        return Asking(self.reward, self._context)

    async def open(self, context: RunContext) -> None:
        self._context = replace(context, engine=None)
        await super().open(context)

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Score]:
        if is_for_groups(self.reward):
            return await self._score_in_worker(prompt, list(samples))
        return await asyncio.gather(*(self(prompt, sample) for sample in samples))


def _named_variables(settings: Any) -> Iterator[str]:
    """Find the environment variables that settings name, such as ``server.api_key_env``."""
    if isinstance(settings, Mapping):
        yield from (value for key, value in settings.items() if key.endswith("_env") and isinstance(value, str))
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for item in settings:
            yield from _named_variables(item)


@dataclass(frozen=True, slots=True)
class Asking:
    """What a worker of `Isolated` holds."""

    reward: Reward
    context: RunContext | None

    def warm(self) -> None:
        """Open the reward."""
        if self.context is not None:
            asyncio.run(self.reward.open(self.context))

    def prepare(self, given: tuple[Prompt, list[Sample]]) -> None:
        """Nothing: the reward is not trusted to run outside of a call."""

    def answer(self, given: tuple[Prompt, list[Sample]]) -> list[Any]:
        """Ask the reward."""
        prompt, samples = given
        return pack_scores(asyncio.run(ask(self.reward, prompt, samples, catches_faults=False)))
