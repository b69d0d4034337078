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
    found = [s if isinstance(s, Score) else Score(value=float(s)) for s in scores]
    return [[s.value, dict(s.components), s.error, list(s.token_rewards.items())] for s in found]


def unpack_scores(answer: Any, count: int) -> list[Score] | str:
    """Decode the scores of an answer, or return why that fails. Never raises, whatever the answer is."""
    try:
        scores = [
            Score(
                value=float(value),
                components={str(k): float(v) for k, v in parts.items()},
                error=error if error is None else str(error),
                token_rewards={position: float(v) for position, v in tokens},
            )
            for value, parts, error, tokens in answer
        ]
    except OverflowError:
        return "a score is too large"
    except (ValueError, TypeError, AttributeError):
        return "the answer cannot be read"
    if len(scores) != count:
        return f"got {len(scores)} scores for {count} samples"
    numbers = [v for s in scores for v in (s.value, *s.components.values(), *s.token_rewards.values())]
    if not all(map(math.isfinite, numbers)):
        return "a score is not finite"
    return next(filter(None, (find_components_error(score.components) for score in scores)), None) or scores
