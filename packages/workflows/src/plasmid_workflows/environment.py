"""Turns in an environment: the policy acts, reads what it observes, and is rewarded by the environment."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from plasmid.components import Reward, Rollout
from plasmid.components.interaction import Environment, Episode, Step
from plasmid.errors import RewardError, one_line
from plasmid.settings.trust import INERT
from plasmid.types import Message, Prompt, Sample
from pydantic import Field, SerializeAsAny

from .conversation import Conversation
from .execution import RolloutFailed
from .transcript import Transcript

T = TypeVar("T")
KEY = "environment"
"""Of what the workflow leaves in a sample's metadata."""


class EnvironmentWorkflow(Conversation):
    """Turns in an environment: it answers each turn with an observation and a reward, until it says that it is done.

    The sample's text are the policy's turns, line by line; the reward ``environment`` pays what the environment gave.
    An environment that raises or takes too long makes the sample one with an error.
    """

    kind: Literal["environment"] = "environment"
    environment: SerializeAsAny[Environment]
    """Where the policy acts."""
    observation_role: Literal["user", "tool"] = "user"
    """Whose messages observations are; prompts of plain text have none."""
    observation_format: Annotated[str, INERT] = "{observation}"
    r"""How an observation is written down; for prompts of plain text often ``"{observation}\n"``."""
    step_timeout_s: float = Field(30.0, gt=0)
    """Longest time for one step of the environment."""

    def model_post_init(self, context: object, /) -> None:
        if "{observation}" not in self.observation_format:
            raise ValueError("observation_format must have {observation} in it; the policy would not see any")
        super().model_post_init(context)

    async def open(self, context: Any) -> None:
        await self.environment.open(context)

    async def close(self) -> None:
        await self.environment.close()

    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        episode = self.environment.episode()
        try:
            return [await self._play(rollout, prompt, episode)]
        finally:
            await self._call_environment("close", episode.close)

    async def _play(self, rollout: Rollout, prompt: Prompt, episode: Episode) -> Sample:
        first = await self._call_environment("reset", episode.reset, rollout.group_seed, prompt)
        state = self.begin(rollout, self._opening(rollout, prompt, first))
        actions: list[str] = []
        rewards = EpisodeRewards()
        while not rewards.done and (action := await state.next_turn()) is not None:
            actions.append(action)
            step = await self._call_environment("step", episode.step, action)
            rewards.add(step)
            if not step.done and not state.is_over():
                state.add_messages([self._message(step.observation)])
        return state.sample(prompt, "\n".join(actions), **{KEY: rewards.metadata()})

    def _opening(self, rollout: Rollout, prompt: Prompt, first: str) -> Transcript:
        """The prompt, and the first observation behind it if there is one."""
        if not first:
            return Transcript.of_prompt(rollout, prompt, keep_past=self.keep_past)
        message = self._message(first)
        if not prompt.messages:
            observed = rollout.encode(str(message["content"]), allow_special=False)
            ids = np.concatenate([prompt.token_ids, observed]).astype(np.int32)
            return Transcript.of_prompt(rollout, replace(prompt, token_ids=ids), keep_past=self.keep_past)
        *before, last = prompt.messages
        if last.get("role") == "user":  # many templates want user and assistant in turn
            messages = [*before, {**last, "content": f"{last.get('content', '')}\n\n{message['content']}"}]
        else:
            messages = [*prompt.messages, {**message, "role": "user"}]
        return Transcript.of_messages(rollout, messages, template=prompt.template, keep_past=self.keep_past)

    def _message(self, observation: str) -> Message:
        return {
            "role": self.observation_role,
            "content": self.observation_format.replace("{observation}", observation),
        }

    async def _call_environment(self, what: str, method: Callable[..., Any], *given: Any) -> Any:
        """Call the environment, away from the event loop if it is not async. Raises `RolloutFailed`."""
        where = f"environment {type(self.environment).model_fields['kind'].default!r}: {what}"
        try:
            call = method(*given) if inspect.iscoroutinefunction(method) else run_in_thread(method, *given)
            return await asyncio.wait_for(call, self.step_timeout_s)
        except TimeoutError:
            raise RolloutFailed(f"{where} did not end within step_timeout_s = {self.step_timeout_s:g}") from None
        except Exception as error:  # boundary: environments are users' code
            raise RolloutFailed(f"{where} raised {one_line(error)}") from error


@dataclass(slots=True)
class EpisodeRewards:
    """Rewards so far."""

    rewards: list[float] = field(default_factory=list)
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    def add(self, step: Any) -> None:
        """Count a step. Raises `RolloutFailed` if it is none."""
        if not isinstance(step, Step) or not math.isfinite(step.reward):
            raise RolloutFailed(f"an environment's step returns a Step with a finite reward, got {step!r:.200}")
        self.rewards.append(float(step.reward))
        self.done, self.info = step.done, {**self.info, **step.info}

    def metadata(self) -> dict[str, Any]:
        """For the metadata of the sample."""
        return {"reward": sum(self.rewards), "rewards": self.rewards, "done": self.done, **self.info}


def run_in_thread(function: Callable[..., T], *given: Any) -> asyncio.Future[T]:
    """Call a function in a thread of its own: one that hangs holds up no other, and not the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failed = None, None
        try:
            result = function(*given)
        except Exception as error:  # noqa: BLE001  boundary: raised where it is awaited
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_outcome, result, failed)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return future


class EnvironmentReward(Reward):
    """The sum of the rewards that the environment gave."""

    kind: Literal["environment"] = "environment"
    unfinished: float | Literal["sum"] = "sum"
    """Value of episodes that a limit ended; ``sum`` pays what they had gained."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        found = sample.metadata.get(KEY)
        if not isinstance(found, dict):
            raise RewardError(
                f"environment: sample {sample.id} comes from no environment; remove the reward, or set "
                'workflow.kind = "environment"'
            )
        if not found["done"] and self.unfinished != "sum":
            return self.unfinished
        return float(found["reward"])
