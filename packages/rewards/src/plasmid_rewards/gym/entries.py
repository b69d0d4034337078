"""Creation and scoring of reasoning-gym entries. Runs in separate processes with a fixed hash seed, because several
families iterate over sets and would otherwise create different entries from the same seed in each process."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plasmid.errors import RewardError, one_line

from ..extras import import_extra

Verifier = Callable[[str, Mapping[str, Any]], float]
NEAR, NEAR_PART = 1e-4, 1e-2
"""Absolute and relative tolerance of a probability. The relative one keeps 0 from matching a small probability."""


def verify_probability(answer: str, entry: Mapping[str, Any]) -> float:
    """Return 1.0 for the right probability as a decimal or a fraction. The package's verifier accepts any prefix of
    it."""
    right = entry["metadata"]["rational"]
    value = right["numerator"] / right["denominator"]
    numerator, _, denominator = answer.replace(",", "").partition("/")
    try:
        difference = abs(float(numerator) / float(denominator or "1") - value)
    except (ValueError, ZeroDivisionError, OverflowError):
        return 0.0
    return float(difference <= min(NEAR, NEAR_PART * value))


def verify_truth(answer: str, entry: Mapping[str, Any]) -> float:
    """Return 1.0 for the right one of ``True`` and ``False``. The package's verifier accepts any text."""
    return float(answer.strip().strip(".").casefold() == str(entry["answer"]).casefold())


OURS: Mapping[str, Verifier] = {"coin_flip": verify_probability, "game_of_life_halting": verify_truth}
"""Replacements for verifiers of reasoning-gym that accept wrong answers, by family (measured with 0.1.25)."""


KEY = "reasoning_gym"
"""Column from which an entry can be created again: family, seed and options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One task."""

    question: str
    answer: str | None
    """A correct answer, or None for families that only verify."""


def families() -> list[str]:
    """Return the names of all families."""
    gym = import_extra("reasoning_gym.factory", extra="reasoning-gym", kind="reasoning-gym")
    return sorted(set(gym.DATASETS) - {"composite"})


def make(family: str, seed: int, options: Mapping[str, Any]) -> Entry:
    """Create the entry of a seed. Raises `RewardError` for an unknown family or unknown options."""
    made = _make_entry(family, seed, json.dumps(dict(options), sort_keys=True))[1]
    answer = made["answer"]
    return Entry(question=str(made["question"]), answer=None if answer is None else str(answer))


def score(family: str, seed: int, options: Mapping[str, Any], answer: str) -> float:
    """Score an answer from 0 to 1 with the family's verifier. An answer that it cannot parse scores 0."""
    dataset, entry = _make_entry(family, seed, json.dumps(dict(options), sort_keys=True))
    if family in OURS:
        return OURS[family](answer, entry)
    try:
        value = float(dataset.score_answer(answer, entry))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  boundary: some verifiers raise on what they cannot parse
        return 0.0
    return min(1.0, max(0.0, value)) if value == value else 0.0


@lru_cache(maxsize=256)
def _make_entry(family: str, seed: int, options: str) -> tuple[Any, Any]:
    """Return the dataset and the entry. The options are JSON."""
    gym = import_extra("reasoning_gym", extra="reasoning-gym", kind="reasoning-gym")
    if family not in families():
        close = difflib.get_close_matches(family, families(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RewardError(f"reasoning-gym: unknown family {family!r}{hint}")
    try:
        dataset = gym.create_dataset(family, seed=seed, size=1, **json.loads(options))
        return dataset, dataset[0]
    except Exception as error:  # noqa: BLE001  boundary: another package asserts on the user's options
        raise RewardError(f"reasoning-gym: {family} with {options}: {one_line(error)}") from None
