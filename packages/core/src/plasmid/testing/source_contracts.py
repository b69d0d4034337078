"""Contract tests of data sources and trackers, for plugin authors.

    check_data_source(MySource(path="rows.txt"))
    check_tracker(MyTracker())

A violation raises an `AssertionError` that names it.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..components import DataFacts, DataSource, PromptEncoder, PromptStream, Tracker
from ..config.load import revive
from ..errors import DataError
from ..protocols import RunContext
from ..types import Ints, Prompt
from .light_contracts import check_settings, is_json, read_state

METRICS: tuple[tuple[int, Mapping[str, float]], ...] = (
    (0, {"eval/test/reward": 0.1, "eval/test/pass@4": 0.4, "eval/test/level=1/reward": 0.0}),
    (
        1,
        {"reward/mean": 0.5, "reward/pass@8": 1.0, "train/grad_norm": math.nan, "train/loss": math.inf, "version": 1.0},
    ),
    (1, {"eval/test/reward": 0.2}),
    (2, {"reward/mean": -1e30, "data/epoch": 2.0}),
)
"""Metrics of a run, by step: an evaluation and a batch may have the same step, and values may be NaN or infinite."""


def encode_bytes(
    prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, tokenize: bool = True
) -> tuple[Ints, str]:
    """Implement `PromptEncoder` with one token per byte. Messages are put on lines of their own."""
    text = prompt if isinstance(prompt, str) else "".join(f"{m['role']}: {m['content']}\n" for m in prompt)
    data = text.encode(errors="replace") if tokenize else b""
    return np.frombuffer(data, np.uint8).astype(np.int32), text


def check_data_source(source: DataSource, *, encode: PromptEncoder = encode_bytes, draws: int = 20) -> None:
    """Check that the source yields the same prompts again: in a second stream, by their ids, and after a resume.

    At most ``draws`` prompts are drawn at a time. ``encode`` tokenizes prompts; by default, one token per byte.
    """
    check_settings(source)
    stream, again = source.stream(encode, seed=1), source.stream(encode, seed=1)
    first = _draw(stream, draws)
    assert first, "a data source must yield at least one prompt"
    for prompt in first:
        _check_prompt(prompt)
    half = _draw(again, (len(first) + 1) // 2)
    saved = read_state(again)
    assert is_json(saved), "state must return JSON types"
    _check_same(first, half + _draw(again, len(first) - len(half)), "a second stream with the same seed")
    resumed = source.stream(encode, seed=1)
    resumed.restore(json.loads(json.dumps(saved)))
    assert read_state(resumed) == saved, "state must return what restore received"
    for prompt in half:  # as for rollouts that were in progress
        _check_same([prompt], [resumed.prompt(prompt.id)], "prompt")
    _check_same(first[len(half) :], _draw(resumed, len(first) - len(half)), "a stream after restore")
    for prompt in first:
        resumed.learn(prompt, [0.0, 1.0])
    assert is_json(read_state(resumed)), "state must return JSON types after learn"
    _check_facts(resumed, first, draws)
    for opened in (stream, again, resumed):
        opened.close()
    _check_evaluation(source, encode, draws)


def _draw(stream: PromptStream, count: int) -> list[Prompt]:
    return list(islice(iter(stream.draw, None), count))


def _check_prompt(prompt: Prompt) -> None:
    assert isinstance(prompt, Prompt), f"draw must return a Prompt or None, got {prompt!r:.100}"
    assert prompt.id and isinstance(prompt.id, str), f"the id of a prompt must be a text, got {prompt.id!r}"
    tokens = prompt.token_ids
    assert isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind == "i", (
        f"token_ids of {prompt.id} must be an array of integers as returned by encode"
    )
    assert len(tokens), f"{prompt.id} must have at least one token"


def _check_same(expected: Sequence[Prompt], found: Sequence[Prompt], what: str) -> None:
    assert [p.id for p in expected] == [p.id for p in found], (
        f"{what} must yield the same prompts: expected {[p.id for p in expected]}, got {[p.id for p in found]}"
    )
    for ours, theirs in zip(expected, found, strict=True):
        for name in ("token_ids", "text", "target", "metadata", "messages", "profile", "source"):
            a, b = getattr(ours, name), getattr(theirs, name)
            same = np.array_equal(a, b) if name == "token_ids" else a == b
            assert same, f"{what} must yield the same prompts: {name} of {ours.id} differs"


def _check_facts(stream: PromptStream, drawn: Sequence[Prompt], draws: int) -> None:
    facts = stream.facts()
    assert isinstance(facts, DataFacts), f"facts must return DataFacts, got {facts!r:.100}"
    if len(drawn) < draws:
        assert facts.num_draws is not None and facts.num_draws >= len(drawn), (
            f"facts must return the number of draws of a source that ends: it ended after {len(drawn)} draws, but "
            f"num_draws is {facts.num_draws}"
        )
    wrong = {name: value for name, value in stream.metrics().items() if not name.startswith("data/")}
    assert not wrong, f"names of metrics must start with data/, got {wrong}"


def _check_evaluation(source: DataSource, encode: PromptEncoder, draws: int) -> None:
    try:
        prompts = list(islice(source.prompts(encode), draws))
    except DataError:
        return  # an endless source
    for prompt in prompts:
        _check_prompt(prompt)
    ids = [prompt.id for prompt in prompts]
    assert len(set(ids)) == len(ids), f"prompts must yield each prompt once, got {ids}"


def check_tracker(tracker: Tracker) -> None:
    """Check that the tracker accepts all metrics of a run, logged from another thread, and those of a resumed run."""
    check_settings(tracker)
    with tempfile.TemporaryDirectory(prefix="plasmid-check-") as folder:
        saved = asyncio.run(_track(tracker, Path(folder), METRICS, {}))
        assert is_json(saved), "state must return JSON types"
        # a resumed run repeats the steps after its checkpoint, in the same folder
        asyncio.run(_track(revive(tracker), Path(folder), METRICS[1:], saved))


async def _track(
    tracker: Tracker, folder: Path, metrics: Sequence[tuple[int, Mapping[str, float]]], state: Mapping[str, Any]
) -> dict[str, Any]:
    await tracker.open(RunContext(seed=0, run_dir=folder))
    try:
        if state:
            tracker.restore(state)
        for step, values in metrics:
            copy = dict(values)
            await asyncio.to_thread(tracker.log, step, copy)
            assert repr(copy) == repr(dict(values)), "log must not change the metrics, which other trackers get as well"
        return read_state(tracker)
    finally:
        await tracker.close()
