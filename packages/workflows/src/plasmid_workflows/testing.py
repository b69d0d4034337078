"""Checks of the guarantees that a run relies on, for authors of workflows, environments and tools.

    asyncio.run(check_workflow(MyWorkflow()))
    asyncio.run(check_environment(MyEnvironment()))
    check_tool(MyTool(), {"text": "a"})

A violated guarantee raises an `AssertionError` that names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from plasmid.components import Workflow
from plasmid.components.interaction import Environment, Step, Tool
from plasmid.components.rollouts import Codec
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig
from plasmid.testing.light_contracts import TEXTS, check_settings, is_json, within_lifetime
from plasmid.testing.rewards import make_prompt
from plasmid.types import Ints, Message, Prompt, Sample, SamplingParams, StopReason

from .execution import Execution
from .result_checks import find_step_error, list_samples
from .tools.signatures import schema
from .tools.toolset import run_tool

ACTIONS = (*TEXTS, "5", "answer: 5", "yes")
"""Examples of actions."""


async def check_workflow(
    workflow: Workflow,
    *,
    prompt: Prompt | None = None,
    codec: Codec | None = None,
    vocab_size: int | None = None,
) -> None:
    """Open the workflow, check the samples of one rollout against an engine that generates digits, and close it.

    Token ids must be below ``vocab_size``, by default that of `Digits`. A ``codec`` without it leaves them unlimited.
    """
    check_settings(workflow)
    prompt = prompt or make_prompt("say a number: ", token_ids=np.array([5, 6], np.int32))
    rollout = Execution(
        id="3/1",
        group_id=3,
        sampling=SamplingParams(max_new_tokens=4),
        client=FakeEngine(FakeEngineConfig(max_delay_s=0.0)),
        codec=codec or Digits(),
        seed=1,
        deadline_s=10.0,
    )
    if vocab_size is None and codec is None:
        vocab_size = max(Digits.vocab_size, *(token + 1 for token in prompt.token_ids.tolist()), 0)
    check = partial(_check_rollout, workflow, rollout, prompt, vocab_size)
    await within_lifetime(workflow, check, engine=rollout.client)


async def _check_rollout(workflow: Workflow, rollout: Execution, prompt: Prompt, vocab_size: int | None) -> None:
    result = await workflow.run(rollout, prompt)
    try:
        samples = list_samples(result, vocab_size=vocab_size)
    except ValueError as error:
        raise AssertionError(f"a workflow {error}" if str(error).startswith("must") else str(error)) from error
    for sample in samples:
        _check_sample(sample, rollout)


def _check_sample(sample: Sample, rollout: Execution) -> None:
    assert str(sample.id).startswith(rollout.id), (
        f"id of a sample must start with the rollout's id, which makes it unique in a run, got {sample.id!r:.100}"
    )
    assert sample.rollout_id == rollout.id, "rollout_id of a sample must be the rollout's id"
    assert sample.group_id == rollout.group_id, "group_id of a sample must be the rollout's group"
    assert sample.stop_reason is not StopReason.ABORT, "stop_reason of a sample must not be ABORT"
    drawn = np.zeros(len(sample.token_ids), np.bool_)
    for span in sample.versions:
        assert 0 <= span.start <= span.end <= len(drawn), "version spans must be within the sample"
        drawn[span.start : span.end] = True
    assert not (sample.loss_mask & ~drawn).any(), "the loss mask must only contain tokens sampled by the policy"
    assert (sample.rollout_logprobs[drawn] < 0).all(), "sampled tokens must have the engine's log-probabilities"


async def check_environment(
    environment: Environment, *, prompt: Prompt | None = None, actions: Sequence[str] = ACTIONS, max_steps: int = 20
) -> None:
    """Run one episode of the environment for each text in ``actions``, with that text as every action.

    Checks that each action returns a valid `Step`, and that the first observation depends only on the seed.
    """
    check_settings(environment)
    asked = prompt or make_prompt("say a number: ", target="5", token_ids=np.array([5, 6], np.int32))
    await within_lifetime(environment, lambda: _check_episodes(environment, asked, actions, max_steps))


async def _check_episodes(environment: Environment, prompt: Prompt, actions: Sequence[str], max_steps: int) -> None:
    starts = set()
    for action in actions:
        episode = environment.episode()
        try:
            start = await _settle(episode.reset(7, prompt))
            assert isinstance(start, str), f"reset must return text, got {start!r:.100}"
            starts.add(start)
            for _ in range(max_steps):
                step = await _settle(episode.step(action))
                _check_step(step, action)
                if step.done:
                    break
        finally:
            await _settle(episode.close())
    assert len(starts) == 1, f"reset must return the same observation for the same seed, got {sorted(starts)}"


def _check_step(step: object, action: str) -> None:
    where = f"step({action!r:.40})"
    mistake = find_step_error(step)
    assert mistake is None and isinstance(step, Step), f"{where} {mistake}"
    assert isinstance(step.observation, str), f"{where} must return text as the observation, got {step.observation!r}"
    assert is_json(dict(step.info)), f"{where} must return info as JSON types, got {step.info!r:.100}"


async def _settle(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def check_tool(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Call the tool with these arguments, and return the text of the tool message.

    Checks that a schema with a description can be generated, and that a call with an unknown argument returns an error.
    """
    check_settings(tool)
    try:
        described = schema(tool.implementation())["function"]
    except ValueError as error:
        raise AssertionError(f"every parameter of a tool must have a name and a type annotation: {error}") from None
    assert described["description"], f"{described['name']} must have a docstring, which tells the policy what it does"
    tool.warm()
    went_well, text = run_tool(tool, arguments)
    assert went_well, f"a call with {arguments!r:.100} must not fail: {text}"
    wrong, _ = run_tool(tool, {**arguments, "no_such_argument": 1})
    assert not wrong, f"{described['name']} must refuse arguments that it does not have"
    return str(text)


class Digits:
    """Implements `plasmid.components.rollouts.Codec`: token 7 is ``0``, token 16 is ``9``, all others are ``?``."""

    vocab_size: ClassVar = 17

    def encode(self, text: str, *, allow_special: bool = True) -> Ints:
        """Return one token per character."""
        return np.array([7 + int(c) if c.isdecimal() else 6 for c in text], np.int32)

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        """Return one character per token."""
        return "".join(str(t - 7) if 7 <= t <= 16 else "?" for t in token_ids.tolist())

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Put every message on its own line."""
        return "".join(f"{message.get('content', '')}\n" for message in messages)
