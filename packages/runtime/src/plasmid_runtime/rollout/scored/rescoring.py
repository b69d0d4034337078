"""Scores samples that are there already with a recipe's rewards: no engine, no model."""

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
    """With their scores; without, if a reward raised."""
    error: str
    """What it raised; empty if none did."""
    seconds: float
    """That scoring the group took."""


async def rescore(config: RunConfig, groups: Sequence[PromptGroup], *, eval_set: str = "") -> list[RescoredGroup]:
    """Score every group, one after another, with training's rewards or those of an evaluation set.

    A reward that raises costs its group the scores and nothing more: this is where such rewards are looked into.
    """
    where, rewards = "rewards", config.rewards
    for index, set_ in enumerate(config.eval):
        if set_.name == eval_set and set_.rewards:
            where, rewards = f"eval.{index}.rewards", set_.rewards
    scorer = Scorer(rewards, where=where, profiles=config.profiles)
    with tempfile.TemporaryDirectory() as folder:
        await scorer.open(RunContext(seed=config.run.seed, run_dir=Path(folder)))
        try:
            return [await _one(scorer, group) for group in groups]
        finally:
            await scorer.close()


async def _one(scorer: Scorer, group: PromptGroup) -> RescoredGroup:
    started, error = time.monotonic(), ""
    samples: Sequence[Sample] = group.samples
    try:
        samples = await scorer.score(group.prompt, group.samples)
    except RewardError as raised:
        error = str(raised)
    return RescoredGroup(group=group, samples=samples, error=error, seconds=time.monotonic() - started)
