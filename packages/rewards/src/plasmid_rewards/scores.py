"""JSON encoding of scores returned by worker processes. Workers run untrusted code, so decoding validates
everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plasmid.components.reward_calls import find_components_error
from plasmid.types import Score


def pack_scores(scores: Sequence[float | Score]) -> list[Any]:
    """Encode scores as JSON values."""
    return [[s.value, dict(s.components), s.error] if isinstance(s, Score) else [float(s), {}, None] for s in scores]


def unpack_scores(answer: Any, count: int) -> list[Score] | str:
    """Decode the scores of an answer, or return why that fails. Never raises, whatever the answer is."""
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
        return "a score is too large"
    except (ValueError, TypeError, AttributeError):
        return "the answer cannot be read"
    if len(scores) != count:
        return f"got {len(scores)} scores for {count} samples"
    finite = all(math.isfinite(v) for score in scores for v in (score.value, *score.components.values()))
    if not finite:
        return "a score is not finite"
    return next(filter(None, (find_components_error(score.components) for score in scores)), None) or scores
