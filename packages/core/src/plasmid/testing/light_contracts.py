"""Contract tests of rewards and filters, for plugin authors.

    check_reward(MyReward(needle="yes"), make_prompt("is it?", target="yes"))
    check_filter(MyFilter())

A violation raises an `AssertionError` that names it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..components import Component, Filter, PromptStream, Reward
from ..components.base import kind_of
from ..components.reward_calls import call_reward
from ..config.load import revive
from ..errors import RewardError, one_line
from ..protocols import RunContext
from ..types import Prompt, Sample, Score
from ..types.shared_groups import freeze_arrays
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
"""Texts that a policy may write. A reward must return a finite score for each of them."""


def check_reward(
    reward: Reward,
    prompt: Prompt,
    *,
    texts: tuple[str, ...] = TEXTS,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Check that the reward returns a finite score for every text, and its lifecycle from `open` to `close`.

    ``prompt`` must have the data that the reward reads, such as a target. ``metadata`` is the samples' metadata.
    """
    check_settings(reward)
    samples = [make_sample(text, metadata=dict(metadata or {})) for text in texts]
    freeze_arrays(samples)
    asyncio.run(within_lifetime(reward, lambda: _check_scores(reward, prompt, samples)))


async def _check_scores(reward: Reward, prompt: Prompt, samples: Sequence[Sample]) -> None:
    for sample in samples:
        text = repr(sample.text[:40])
        first, second = [await _score(reward, prompt, sample) for _ in range(2)]
        assert reward.in_order() or first.value == second.value, f"the score of {text} depends on earlier calls"


async def _score(reward: Reward, prompt: Prompt, sample: Sample) -> Score:
    """Score a sample as runs do, except that faults of the sample's text are violations as well."""
    where, start = kind_of(reward), asyncio.ensure_future
    try:
        with refuse_writes():
            given = await call_reward(reward, prompt, [sample], where=where, start=start, catches_faults=False)
    except (RewardError, OverflowError) as error:
        raise AssertionError(f"the score of {sample.text[:40]!r}: {error}") from error
    return given[0]


def check_filter(filter_: Filter) -> None:
    """Check that the filter returns a bool for groups with equal, different, single and failed samples."""
    check_settings(filter_)
    asyncio.run(within_lifetime(filter_, lambda: _check_choices(filter_)))


async def _check_choices(filter_: Filter) -> None:
    for rewards in ((1.0, 1.0), (0.0, 1.0), (0.5,), (None, 1.0), (0.0, None, 0.0)):
        group = make_group(*rewards)
        freeze_arrays(group.samples)
        with refuse_writes():
            kept = filter_(group)
        assert isinstance(kept, bool | np.bool_), f"a filter must return True or False, got {kept!r} for {rewards}"


@contextmanager
def refuse_writes() -> Iterator[None]:
    """Convert the error of a write to a read-only array into an `AssertionError` that says what is not allowed."""
    try:
        yield
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise AssertionError(f"arrays of samples are read-only in runs; change a copy: {one_line(error)}") from error


def check_settings(component: Component) -> None:
    """Check that the settings survive serialization to JSON, as other processes receive them."""
    copy = revive(component)
    assert copy.model_dump() == component.model_dump(), "settings must survive JSON"


async def within_lifetime(component: Component, check: Callable[[], Awaitable[None]], *, engine: Any = None) -> None:
    """Open the component, run ``check``, save its state, close it, and restore the state into a copy."""
    with tempfile.TemporaryDirectory(prefix="plasmid-check-") as folder:
        context = RunContext(seed=0, run_dir=Path(folder), engine=engine)
        await component.open(context)
        try:
            await check()
            saved = read_state(component)
        finally:
            await component.close()
        assert is_json(saved), "state must return JSON types"
        if not saved:
            return
        again = revive(component)
        await again.open(context)
        try:
            again.restore(again.merge([saved]))
            assert read_state(again).keys() == saved.keys(), "state must return the same keys after restore"
        finally:
            await again.close()


def read_state(component: Component | PromptStream) -> dict[str, Any]:
    """Return a copy of the state, which must be a mapping."""
    state: object = component.state()
    assert isinstance(state, Mapping), f"state must return a mapping, got {state!r:.100}"
    return dict(state)


def is_json(value: Any) -> bool:
    """Return True if the value is the same after serialization to JSON."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except TypeError:
        return False
