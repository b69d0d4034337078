"""Scores as JSON, in which worker processes answer: what one of them ran is not trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plasmid.components.reward_calls import components_fault
from plasmid.types import Score


def pack_scores(scores: Sequence[float | Score]) -> list[Any]:
    """Scores as JSON has them."""
    return [[s.value, dict(s.components), s.error] if isinstance(s, Score) else [float(s), {}, None] for s in scores]


def unpack_scores(answer: Any, count: int) -> list[Score] | str:
    """The scores in an answer, or why it has none. Raises nothing, whatever was answered."""
    try:
        scores = [
            Score(
                value=float(value),
                components={str(k): float(v) for k, v in parts.items()},
                error=error if error is None else str(error),
            )
            for value, parts, error in answer
        ]
    except OverflowError:
        return "a score is too large a number"
    except (ValueError, TypeError, AttributeError):
        return "the answer cannot be read"
    if len(scores) != count:
        return f"{len(scores)} scores came for {count} samples"
    finite = all(math.isfinite(v) for score in scores for v in (score.value, *score.components.values()))
    if not finite:
        return "a score is not finite"
    return next(filter(None, (components_fault(score.components) for score in scores)), None) or scores
