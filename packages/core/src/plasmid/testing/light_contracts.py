"""What the loop relies on in rewards, filters and workflows, as checks that plugin authors run on their own.

    check_reward(MyReward(needle="yes"), make_prompt("is it?", target="yes"))
    check_filter(MyFilter())
    asyncio.run(check_workflow(MyWorkflow()))

A promise that is not kept is an `AssertionError` that says which.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..components import Component, Filter, Reward, Workflow
from ..protocols import RunContext
from ..recipe import revive
from ..rollout.execution import Codec, Execution
from ..types import Ints, Message, Prompt, Sample, SamplingParams, Score, StopReason
from .fakes import FakeEngine, FakeEngineConfig
from .rewards import make_group, make_prompt, make_sample

TEXTS = (
    "",
    " \n\t",
    "\x00\x1b[31m",
    "\ud7ff\U0001f600\u202e",
    "(" * 2000,
    "9" * 5000,
    "\\boxed{" * 200,
    "1e999999 / 0 - inf nan None",
    "<answer></answer></think>",
    '{"a": [1, {"b":',
)
"""What a policy may write: a reward must have a number for all of it."""


def check_reward(
    reward: Reward,
    prompt: Prompt,
    *,
    texts: tuple[str, ...] = TEXTS,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Check that every text has one finite score, from `open` to `close`.

    The prompt has what the reward needs: a target, metadata, ... ``metadata`` is what a workflow leaves in samples.
    """
    _check_settings(reward)
    samples = [make_sample(text, metadata=dict(metadata or {})) for text in texts]
    asyncio.run(_within(reward, lambda: _check_scores(reward, prompt, samples)))


async def _check_scores(reward: Reward, prompt: Prompt, samples: Sequence[Sample]) -> None:
    for sample in samples:
        said = repr(sample.text[:40])
        first, second = [await _score(reward, prompt, sample) for _ in range(2)]
        assert math.isfinite(first.value), f"the score of {said} is {first.value}"
        assert reward.in_order() or first.value == second.value, f"the score of {said} depends on calls before"
        wrong = {name: value for name, value in first.components.items() if not math.isfinite(value)}
        assert not wrong, f"components of {said} are no numbers: {wrong}"


async def _score(reward: Reward, prompt: Prompt, sample: Sample) -> Score:
    given = await reward.score_group(prompt, [sample])
    assert len(given) == 1, "score_group gives one score for each sample"
    return given[0] if isinstance(given[0], Score) else Score(value=float(given[0]))


def check_filter(filter_: Filter) -> None:
    """Check that groups of equal, different, single and partly failed samples are each kept or dropped."""
    _check_settings(filter_)
    asyncio.run(_within(filter_, lambda: _check_choices(filter_)))


async def _check_choices(filter_: Filter) -> None:
    for rewards in ((1.0, 1.0), (0.0, 1.0), (0.5,), (None, 1.0), (0.0, None, 0.0)):
        kept = filter_(make_group(*rewards))
        assert isinstance(kept, bool | np.bool_), f"a filter returns True or False, got {kept!r} for {rewards}"


async def check_workflow(workflow: Workflow, *, prompt: Prompt | None = None, codec: Codec | None = None) -> None:
    """Open the workflow, check the samples of one rollout against an engine that answers digits, close it."""
    _check_settings(workflow)
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
    await _within(workflow, lambda: _check_rollout(workflow, rollout, prompt), engine=rollout.client)


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


def _check_settings(component: Component) -> None:
    """Other processes get a component as plain data."""
    copy = revive(component)
    assert copy.model_dump() == component.model_dump(), "settings survive JSON"


async def _within(component: Component, check: Callable[[], Awaitable[None]], *, engine: Any = None) -> None:
    """Open the component, check it, save what it remembers, close it; a new one takes that up again."""
    with tempfile.TemporaryDirectory(prefix="plasmid-check-") as folder:
        context = RunContext(seed=0, run_dir=Path(folder), engine=engine)
        await component.open(context)
        try:
            await check()
            saved = dict(component.state())
        finally:
            await component.close()
        assert _is_json(saved), "a state has JSON types only"
        if not saved:
            return
        again = revive(component)
        await again.open(context)
        try:
            again.restore(again.merge([saved]))
            assert dict(again.state()).keys() == saved.keys(), "what was restored is saved again"
        finally:
            await again.close()


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except TypeError:
        return False


class Digits:
    """Implements `execution.Codec`: token 7 is ``0``, token 16 is ``9``, the rest is ``?``."""

    def encode(self, text: str) -> Ints:
        """One token for each character."""
        return np.array([7 + int(c) if c.isdecimal() else 6 for c in text], np.int32)

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        """One character for each token."""
        return "".join(str(t - 7) if 7 <= t <= 16 else "?" for t in token_ids.tolist())

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Every message on a line of its own."""
        return "".join(f"{message.get('content', '')}\n" for message in messages)
