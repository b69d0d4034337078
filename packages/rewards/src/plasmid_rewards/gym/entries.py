"""Making and scoring entries of reasoning-gym. Runs in processes of its own, with one hash seed: several families go
through sets, so that the same seed makes another entry in another process otherwise."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plasmid.errors import RewardError, one_line

from ..extras import import_extra
from .verifiers import OURS

KEY = "reasoning_gym"
"""Column that says how to make an entry again: family, seed and options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One task."""

    question: str
    answer: str | None
    """An answer that is right; None where a family only verifies."""


def families() -> list[str]:
    """Names of all families."""
    gym = import_extra("reasoning_gym.factory", extra="reasoning-gym", kind="reasoning-gym")
    return sorted(set(gym.DATASETS) - {"composite"})


def make(family: str, seed: int, options: Mapping[str, Any]) -> Entry:
    """The entry of a seed. Raises `RewardError` if there is no such family, or it does not have these options."""
    made = _made(family, seed, json.dumps(dict(options), sort_keys=True))[1]
    answer = made["answer"]
    return Entry(question=str(made["question"]), answer=None if answer is None else str(answer))


def score(family: str, seed: int, options: Mapping[str, Any], answer: str) -> float:
    """What the family's verifier says of an answer, from 0 to 1. One that it cannot read gets 0."""
    dataset, entry = _made(family, seed, json.dumps(dict(options), sort_keys=True))
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
def _made(family: str, seed: int, options: str) -> tuple[Any, Any]:
    """Dataset and entry. The options are JSON."""
    gym = import_extra("reasoning_gym", extra="reasoning-gym", kind="reasoning-gym")
    if family not in families():
        close = difflib.get_close_matches(family, families(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RewardError(f"reasoning-gym: there is no family {family!r}{hint}")
    try:
        dataset = gym.create_dataset(family, seed=seed, size=1, **json.loads(options))
        return dataset, dataset[0]
    except Exception as error:  # noqa: BLE001  boundary: options of the user meet assertions of another package
        raise RewardError(f"reasoning-gym: {family} with {options}: {one_line(error)}") from None
