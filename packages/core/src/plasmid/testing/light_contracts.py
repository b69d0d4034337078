"""What the loop relies on in rewards and filters, as checks that plugin authors run on their own.

    check_reward(MyReward(needle="yes"), make_prompt("is it?", target="yes"))
    check_filter(MyFilter())

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

from ..components import Component, Filter, Reward
from ..config.load import revive
from ..protocols import RunContext
from ..types import Prompt, Sample, Score
from .rewards import make_group, make_sample

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
    check_settings(reward)
    samples = [make_sample(text, metadata=dict(metadata or {})) for text in texts]
    asyncio.run(within_lifetime(reward, lambda: _check_scores(reward, prompt, samples)))


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
    check_settings(filter_)
    asyncio.run(within_lifetime(filter_, lambda: _check_choices(filter_)))


async def _check_choices(filter_: Filter) -> None:
    for rewards in ((1.0, 1.0), (0.0, 1.0), (0.5,), (None, 1.0), (0.0, None, 0.0)):
        kept = filter_(make_group(*rewards))
        assert isinstance(kept, bool | np.bool_), f"a filter returns True or False, got {kept!r} for {rewards}"


def check_settings(component: Component) -> None:
    """Other processes get a component as plain data."""
    copy = revive(component)
    assert copy.model_dump() == component.model_dump(), "settings survive JSON"


async def within_lifetime(component: Component, check: Callable[[], Awaitable[None]], *, engine: Any = None) -> None:
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
