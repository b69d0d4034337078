"""What the loop relies on in workflows, as a check that plugin authors run on their own.

    asyncio.run(check_workflow(MyWorkflow()))

A promise that is not kept is an `AssertionError` that says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from plasmid.components import Workflow
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig
from plasmid.testing.light_contracts import check_settings, within_lifetime
from plasmid.testing.rewards import make_prompt
from plasmid.types import Ints, Message, Prompt, Sample, SamplingParams, StopReason

from .execution import Codec, Execution


async def check_workflow(workflow: Workflow, *, prompt: Prompt | None = None, codec: Codec | None = None) -> None:
    """Open the workflow, check the samples of one rollout against an engine that answers digits, close it."""
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
    assert samples, "a rollout makes at least one sample"
    assert len({sample.id for sample in samples}) == len(samples), "samples of one rollout have ids of their own"
    for sample in samples:
        _check_sample(sample, rollout)


def _check_sample(sample: Sample, rollout: Execution) -> None:
    assert sample.rollout_id == rollout.id, "samples name their rollout"
    assert sample.group_id == rollout.group_id, "samples name their group"
    assert sample.stop_reason is not StopReason.ABORT, "an aborted request goes on; no sample ends with it"
    drawn = np.zeros(len(sample.token_ids), np.bool_)
    for span in sample.versions:
        assert 0 <= span.start <= span.end <= len(drawn), "version spans lie within the sample"
        drawn[span.start : span.end] = True
    assert not (sample.loss_mask & ~drawn).any(), "only tokens that the policy drew are trained on"
    assert (sample.rollout_logprobs[drawn] < 0).all(), "drawn tokens have the engine's log-probabilities"


class Digits:
    """Implements `execution.Codec`: token 7 is ``0``, token 16 is ``9``, the rest is ``?``."""

    def encode(self, text: str, *, allow_special: bool = True) -> Ints:
        """One token for each character."""
        return np.array([7 + int(c) if c.isdecimal() else 6 for c in text], np.int32)

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        """One character for each token."""
        return "".join(str(t - 7) if 7 <= t <= 16 else "?" for t in token_ids.tolist())

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Every message on a line of its own."""
        return "".join(f"{message.get('content', '')}\n" for message in messages)
