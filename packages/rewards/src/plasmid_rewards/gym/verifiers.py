"""Verifiers of ours, for families of reasoning-gym whose own ones accept wrong answers (measured with 0.1.25)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Verifier = Callable[[str, Mapping[str, Any]], float]
NEAR, NEAR_PART = 1e-4, 1e-2
"""Largest difference of a probability, and the largest part of it: 0 is not near to a small one."""


def probability(answer: str, entry: Mapping[str, Any]) -> float:
    """1.0 for the probability as a decimal number or a fraction. The package's own takes any beginning of it."""
    right = entry["metadata"]["rational"]
    value = right["numerator"] / right["denominator"]
    numerator, _, denominator = answer.replace(",", "").partition("/")
    try:
        difference = abs(float(numerator) / float(denominator or "1") - value)
    except (ValueError, ZeroDivisionError, OverflowError):
        return 0.0
    return float(difference <= min(NEAR, NEAR_PART * value))


def truth(answer: str, entry: Mapping[str, Any]) -> float:
    """1.0 for the right one of ``True`` and ``False``. The package's own takes any text."""
    return float(answer.strip().strip(".").casefold() == str(entry["answer"]).casefold())


OURS: Mapping[str, Verifier] = {"coin_flip": probability, "game_of_life_halting": truth}
"""Family -> what verifies it in place of the package."""
