"""Score existing samples with a recipe's rewards, without engine or model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid.errors import RewardError
from plasmid.protocols import RunContext
from plasmid.types import PromptGroup, Sample

from .scoring import Scorer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RescoredGroup:
    """One prompt group after scoring."""

    group: PromptGroup
    samples: Sequence[Sample]
    """Samples with their scores; without scores if a reward raised an exception."""
    error: str
    """Message of that exception; empty if there was none."""
    seconds: float
    """Time to score the group, in seconds."""


async def rescore(config: RunConfig, groups: Sequence[PromptGroup], *, eval_set: str = "") -> list[RescoredGroup]:
    """Score every group in order, with the rewards of training or of an evaluation set.

    If a reward raises `RewardError`, its group has no scores, and the other groups are still scored.
    """
    where, rewards = "rewards", config.rewards
    for index, set_ in enumerate(config.eval):
        if set_.name == eval_set and set_.rewards:
            where, rewards = f"eval.{index}.rewards", set_.rewards
    scorer = Scorer(rewards, where=where, profiles=config.profiles)
    with tempfile.TemporaryDirectory() as folder:
        await scorer.open(RunContext(seed=config.run.seed, run_dir=Path(folder)))
        try:
            return [await _rescore_group(scorer, group) for group in groups]
        finally:
            await scorer.close()


async def _rescore_group(scorer: Scorer, group: PromptGroup) -> RescoredGroup:
    started, error = time.monotonic(), ""
    samples: Sequence[Sample] = group.samples
    try:
        samples = await scorer.score(group.prompt, group.samples)
    except RewardError as raised:
        error = str(raised)
    return RescoredGroup(group=group, samples=samples, error=error, seconds=time.monotonic() - started)
