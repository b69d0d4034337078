"""What a producer saves that keeps nothing it has drawn: the state between two batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...batch import GroupRef
from .draws import Draws


class BetweenBatches:
    """Half a `producer.Producer`: a resume draws everything again that was drawn since the last batch was trained."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._boundary = draws.state([])

    def release(self, count: int, *, version: int) -> None:
        """What was taken has been trained on."""
        self._boundary = self._draws.state([])

    def state(self) -> dict[str, Any]:
        """As it was when the last batch had been trained."""
        return self._boundary

    def finished(self) -> tuple[GroupRef, ...]:
        """Nothing: whole batches are taken."""
        return ()

    def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        """Continue between the two batches."""
        self._draws.restore(state)
        self._boundary = self._draws.state([])
