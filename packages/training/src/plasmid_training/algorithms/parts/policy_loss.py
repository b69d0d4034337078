"""Result of a policy loss, and the probability ratio (current over old policy), which cannot overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Method = TypeVar("Method", bound=Callable[..., Any])
LIMIT = 20.0
"""Largest absolute difference of log-probabilities that is exponentiated: e^20 is 4.9e8. Beyond it the value is
constant and has no gradient; without a limit, one token could make the gradient infinite or NaN."""


def exp_difference(difference: Tensor) -> Tensor:
    """Exponentiate a difference of log-probabilities, clamped to +-`LIMIT`."""
    return difference.clamp(-LIMIT, LIMIT).exp()


def tokenwise(method: Method) -> Method:
    """Mark a ``policy_loss`` in which the loss of a token depends on that token's inputs only."""
    method.is_tokenwise = True  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLoss:
    """Policy loss and its statistics; [T] each."""

    loss: Tensor
    ratio: Tensor
    """Probability ratio of the current to the old policy; carries the gradient."""
    clipped: Tensor
    """bool: the clip raised the loss, so the token has no gradient."""
    dual_clipped: Tensor | None = None
    """bool: the dual clip lowered the loss, so the token has no gradient; None without a dual clip."""
