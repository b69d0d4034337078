"""Create prompts, samples and groups for tests of rewards and filters."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from ..components import Reward
from ..types import Prompt, PromptGroup, Sample, SamplingParams, Score, StopReason, VersionSpan


def make_prompt(text: str = "", **fields: Any) -> Prompt:
    """Create a prompt without tokens. ``fields`` are fields of `Prompt` (``target``, ``metadata``, ...)."""
    return Prompt(**({"id": "test:1", "token_ids": np.zeros(0, np.int32), "text": text} | fields))


def make_sample(text: str = "", *, num_generated: int = 1, **fields: Any) -> Sample:
    """Create a sample with this generated text. ``fields`` are fields of `Sample` (``id``, ``stop_reason``, ...)."""
    id_ = str(fields.pop("id", "0/0"))
    values: dict[str, Any] = {
        "rollout_id": id_,
        "group_id": 0,
        "prompt_id": "test:1",
        "token_ids": np.zeros(num_generated, np.int32),
        "loss_mask": np.ones(num_generated, np.bool_),
        "rollout_logprobs": np.zeros(num_generated, np.float32),
        "versions": (VersionSpan(version=0, start=0, end=num_generated),),
        "sampling": SamplingParams(),
        "stop_reason": StopReason.STOP,
    }
    return Sample(id=id_, text=text, **(values | fields))


def make_group(*rewards: float | None) -> PromptGroup:
    """Create a group whose samples have these rewards; None creates a sample of a failed rollout."""
    samples = [_with_scores(index, reward) for index, reward in enumerate(rewards)]
    return PromptGroup(id=0, prompt=make_prompt(), samples=samples)


def _with_scores(index: int, reward: float | None) -> Sample:
    failed: dict[str, Any] = {"stop_reason": StopReason.ERROR, "error": "failed"} if reward is None else {}
    return make_sample(id=f"0/{index}", score=Score(value=reward or 0.0), **failed)


def score_text(reward: Reward, text: str = "", *, prompt: str = "", target: Any = None, **fields: Any) -> Score:
    """Return the reward's score of a sample with this text. Raises the reward's errors."""
    given = asyncio.run(_score(reward, make_prompt(prompt, target=target), make_sample(text, **fields)))
    return given if isinstance(given, Score) else Score(value=float(given))


async def _score(reward: Reward, prompt: Prompt, sample: Sample) -> float | Score:
    return await reward(prompt, sample)
