"""Multi-turn workflow in an environment: the policy acts, reads observations and receives rewards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from plasmid.components import RecipeView, Reward, Rollout
from plasmid.components.interaction import Environment
from plasmid.errors import ConfigError, DeadlineError, IsolationError, PlasmidError, RewardError, one_line
from plasmid.settings.trust import INERT
from plasmid.types import Message, Prompt, Sample, Score
from plasmid.utils.waiting import run_in_thread, wait_within
from pydantic import Field, PrivateAttr, SerializeAsAny

from .conversation import Conversation
from .episodes.client import EpisodeProcesses, ForkedEpisode
from .execution import RolloutFailed
from .result_checks import find_step_error
from .transcript import Transcript


class LocalEpisode:
    """One episode. Async methods run on the event loop, others in threads, which cannot be stopped if they hang."""

    def __init__(self, environment: Environment) -> None:
        self._episode = environment.episode()
        self.is_killed = False

    async def call(self, method: str, *given: Any) -> Any:
        """Call a method of the episode."""
        bound = getattr(self._episode, method)
        if inspect.iscoroutinefunction(bound):
            return await bound(*given)
        return await run_in_thread(bound, *given, name="environment")

    def kill(self) -> None:
        """Do nothing: `close` is called even if a step hangs."""


KEY = "environment"
"""Key of this workflow's data in a sample's metadata."""
WITHOUT_PROCESS = "`isolated = False` in its class runs episodes in the rollout worker"


class EnvironmentWorkflow(Conversation):
    """Turns in an environment, which answers each with an observation and a reward until it reports that it is done.

    The sample's text consists of the policy's turns, line by line; the reward ``environment`` returns the environment's
    rewards. An environment that raises or takes too long makes the sample fail with an error.
    """

    kind: Literal["environment"] = "environment"
    environment: SerializeAsAny[Environment]
    """Environment in which the policy acts."""
    observation_role: Literal["user", "tool"] = "user"
    """Role of the messages with observations; plain-text prompts have no messages."""
    observation_format: Annotated[str, INERT] = "{observation}"
    r"""Format of an observation; for plain-text prompts often ``"{observation}\n"``."""
    step_timeout_s: float = Field(30.0, gt=0)
    """Time limit for one step of the environment, in seconds."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if "{observation}" not in self.observation_format:
            yield "observation_format must contain {observation}"

    _processes: EpisodeProcesses | None = PrivateAttr(None)
    """None if episodes run in this process."""

    async def open(self, context: Any) -> None:
        if self.environment.isolated:
            processes = EpisodeProcesses(self.environment, context)
            try:
                is_plain = await processes.start()
            except PlasmidError as error:
                processes.close()
                raise ConfigError(f"workflow.environment: {error}; {WITHOUT_PROCESS}") from None
            if is_plain:
                self._processes = processes
                return
            processes.close()
        await self.environment.open(context)

    async def close(self) -> None:
        if self._processes is None:
            await self.environment.close()
            return
        processes, self._processes = self._processes, None
        await asyncio.to_thread(processes.close)

    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        try:
            episode = LocalEpisode(self.environment) if self._processes is None else await self._processes.episode()
        except (EOFError, OSError) as error:
            raise RolloutFailed(f"the environment process has ended: {one_line(error)}") from None
        try:
            try:
                return [await self._play(rollout, prompt, episode)]
            except asyncio.CancelledError:
                episode.kill()
                raise
            finally:
                if not episode.is_killed:
                    await self._call_environment(episode, "close")
        finally:
            episode.kill()

    async def _play(self, rollout: Rollout, prompt: Prompt, episode: LocalEpisode | ForkedEpisode) -> Sample:
        first = await self._call_environment(episode, "reset", rollout.group_seed, prompt)
        state = self.begin(rollout, self._start_transcript(rollout, prompt, first))
        actions: list[str] = []
        rewards = EpisodeRewards()
        while not rewards.done and (action := await state.next_turn()) is not None:
            actions.append(action)
            step = await self._call_environment(episode, "step", action)
            rewards.add(step)
            if not step.done and not state.is_over():
                state.add_messages([self._message(step.observation)])
        ends = {"turn_ends": state.transcript.turn_ends()}
        return state.sample(prompt, "\n".join(actions), **{KEY: rewards.metadata() | ends})

    def _start_transcript(self, rollout: Rollout, prompt: Prompt, first: str) -> Transcript:
        """Return the prompt, followed by the first observation if there is one."""
        if not first:
            return Transcript.of_prompt(rollout, prompt, keep_past=self.keep_past)
        message = self._message(first)
        if not prompt.messages:
            observed = rollout.encode(str(message["content"]), allow_special=False)
            ids = np.concatenate([prompt.token_ids, observed]).astype(np.int32)
            return Transcript.of_prompt(rollout, replace(prompt, token_ids=ids), keep_past=self.keep_past)
        *before, last = prompt.messages
        if last.get("role") == "user":  # many templates require user and assistant to alternate
            messages = [*before, {**last, "content": f"{last.get('content', '')}\n\n{message['content']}"}]
        else:
            messages = [*prompt.messages, {**message, "role": "user"}]
        return Transcript.of_messages(rollout, messages, template=prompt.template, keep_past=self.keep_past)

    def _message(self, observation: str) -> Message:
        return {
            "role": self.observation_role,
            "content": self.observation_format.replace("{observation}", observation),
        }

    async def _call_environment(self, episode: LocalEpisode | ForkedEpisode, what: str, *given: Any) -> Any:
        """Call a method of the episode. Raises `RolloutFailed`; an episode that hangs is killed."""
        where = f"environment {type(self.environment).model_fields['kind'].default!r}: {what}"
        try:
            return await wait_within(self.step_timeout_s, where, episode.call(what, *given))
        except DeadlineError:
            episode.kill()
            raise RolloutFailed(f"{where} did not finish within step_timeout_s = {self.step_timeout_s:g}") from None
        except IsolationError as error:
            raise RolloutFailed(f"{where} raised {error}") from None
        except Exception as error:  # boundary: environments are users' code
            raise RolloutFailed(f"{where} raised {one_line(error)}") from error


@dataclass(slots=True)
class EpisodeRewards:
    """Rewards of an episode so far."""

    rewards: list[float] = field(default_factory=list)
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    def add(self, step: Any) -> None:
        """Record a step. Raises `RolloutFailed` if it is not a valid `Step`."""
        if (mistake := find_step_error(step)) is not None:
            raise RolloutFailed(f"step() of an environment {mistake}")
        self.rewards.append(float(step.reward))
        self.done, self.info = step.done, {**self.info, **step.info}

    def metadata(self) -> dict[str, Any]:
        """Return the rewards for the sample's metadata."""
        return {"reward": sum(self.rewards), "rewards": self.rewards, "done": self.done, **self.info}


class EnvironmentReward(Reward):
    """The sum of the rewards that the environment gave. Each is assigned to its turn, for algorithms that use rewards
    by turn."""

    kind: Literal["environment"] = "environment"
    unfinished: float | Literal["sum"] = "sum"
    """Value of episodes that a limit ended; ``sum`` uses their rewards so far."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float | Score:
        found = sample.metadata.get(KEY)
        if not isinstance(found, dict):
            raise RewardError(
                f"environment: sample {sample.id} is not from an environment; remove the reward, or set "
                'workflow.kind = "environment"'
            )
        if not found["done"] and self.unfinished != "sum":
            return self.unfinished
        turns = dict(zip(found.get("turn_ends", ()), found["rewards"], strict=False))
        return Score(value=float(found["reward"]), token_rewards=turns)
