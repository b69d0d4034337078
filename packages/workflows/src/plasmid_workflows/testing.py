"""Check of the guarantees that the training loop relies on, for authors of workflows.

    asyncio.run(check_workflow(MyWorkflow()))

A violated guarantee raises an `AssertionError` that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from plasmid.components import Workflow
from plasmid.components.rollouts import Codec
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig
from plasmid.testing.light_contracts import check_settings, within_lifetime
from plasmid.testing.rewards import make_prompt
from plasmid.types import Ints, Message, Prompt, Sample, SamplingParams, StopReason

from .execution import Execution


async def check_workflow(workflow: Workflow, *, prompt: Prompt | None = None, codec: Codec | None = None) -> None:
    """Open the workflow, check the samples of one rollout against an engine that generates digits, and close it."""
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
    await within_lifetime(workflow, lambda: _check_rollout(workflow, rollout, prompt), engine=rollout.client)


async def _check_rollout(workflow: Workflow, rollout: Execution, prompt: Prompt) -> None:
    samples = await workflow.run(rollout, prompt)
    assert samples, "a rollout must return at least one sample"
    assert len({sample.id for sample in samples}) == len(samples), "samples of one rollout must have distinct ids"
    for sample in samples:
        _check_sample(sample, rollout)


def _check_sample(sample: Sample, rollout: Execution) -> None:
    assert sample.rollout_id == rollout.id, "rollout_id of a sample must be the rollout's id"
    assert sample.group_id == rollout.group_id, "group_id of a sample must be the rollout's group"
    assert sample.stop_reason is not StopReason.ABORT, "stop_reason of a sample must not be ABORT"
    drawn = np.zeros(len(sample.token_ids), np.bool_)
    for span in sample.versions:
        assert 0 <= span.start <= span.end <= len(drawn), "version spans must be within the sample"
        drawn[span.start : span.end] = True
    assert not (sample.loss_mask & ~drawn).any(), "the loss mask must only contain tokens sampled by the policy"
    assert (sample.rollout_logprobs[drawn] < 0).all(), "sampled tokens must have the engine's log-probabilities"


class Digits:
    """Implements `plasmid.components.rollouts.Codec`: token 7 is ``0``, token 16 is ``9``, all others are ``?``."""

    def encode(self, text: str, *, allow_special: bool = True) -> Ints:
        """Return one token per character."""
        return np.array([7 + int(c) if c.isdecimal() else 6 for c in text], np.int32)

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        """Return one character per token."""
        return "".join(str(t - 7) if 7 <= t <= 16 else "?" for t in token_ids.tolist())

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Put every message on its own line."""
        return "".join(f"{message.get('content', '')}\n" for message in messages)
