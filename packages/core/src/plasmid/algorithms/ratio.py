"""Probability ratios that cannot overflow."""

from __future__ import annotations

from torch import Tensor

LIMIT = 20.0
"""Largest absolute difference of log-probabilities that is exponentiated: e^20 is 4.9e8. Past it the value is constant
and has no gradient; without a limit one token would turn the gradient into infinity, or 0 * infinity."""


def exp_difference(difference: Tensor) -> Tensor:
    """exp of a difference of log-probabilities, clamped to plus and minus `LIMIT`."""
    return difference.clamp(-LIMIT, LIMIT).exp()
