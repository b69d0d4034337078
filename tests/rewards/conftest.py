"""Samples and groups by hand."""

import asyncio

import numpy as np
import pytest
from plasmid import Prompt, PromptGroup, Sample, SamplingParams, Score, StopReason, VersionSpan


def make_sample(text="", *, id="0/0", num_generated=1, reward=None, stop=StopReason.STOP) -> Sample:
    return Sample(
        id=id,
        rollout_id=id,
        group_id=0,
        prompt_id="t.jsonl:1",
        token_ids=np.zeros(num_generated, np.int32),
        loss_mask=np.ones(num_generated, np.bool_),
        rollout_logprobs=np.zeros(num_generated, np.float32),
        versions=(VersionSpan(version=0, start=0, end=num_generated),),
        sampling=SamplingParams(),
        text=text,
        stop_reason=stop,
        error="failed" if stop is StopReason.ERROR else None,
        score=None if reward is None else Score(value=reward),
    )


def make_prompt(target=None) -> Prompt:
    return Prompt(id="t.jsonl:1", token_ids=np.zeros(1, np.int32), target=target)


@pytest.fixture
def score():
    """Ask a reward about a text; a plain number becomes a Score."""

    def ask(reward, text="", *, target=None, **fields) -> Score:
        given = asyncio.run(reward(make_prompt(target), make_sample(text, **fields)))
        return given if isinstance(given, Score) else Score(value=given)

    return ask


@pytest.fixture
def group():
    """A group of samples with these rewards; None is a failed rollout, a tuple holds reward and stop reason."""

    def make(*rewards) -> PromptGroup:
        samples = []
        for i, item in enumerate(rewards):
            reward, stop = item if isinstance(item, tuple) else (item, StopReason.STOP)
            if reward is None:
                reward, stop = 0.0, StopReason.ERROR
            samples.append(make_sample(id=f"0/{i}", reward=reward, stop=stop))
        return PromptGroup(id=0, prompt=make_prompt(), samples=samples)

    return make
