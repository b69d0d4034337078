"""Top tokens: the K most likely next tokens of a teacher at each position, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TopChoice:
    """Which top tokens to choose at a position."""

    count: int
    """K."""
    num_tokens: int
    """Size of the policy's vocabulary: tokens with higher ids, which only the teacher has, are left out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """The K most likely tokens at each of n positions, in any order, with log-probabilities over the whole vocabulary.

    Takes 8 K bytes per position.
    """

    token_ids: NDArray[np.int32]
    """[n, K] without duplicates within a position."""
    logprobs: NDArray[np.float32]
    """[n, K]; NaN if unknown."""

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.logprobs.shape:
            raise ValueError(
                f"top tokens must have ids and log-probabilities of one shape [n, K], got {self.token_ids.shape} and "
                f"{self.logprobs.shape}"
            )

    @property
    def num_positions(self) -> int:
        """n."""
        return len(self.token_ids)

    @property
    def count(self) -> int:
        """K."""
        return int(self.token_ids.shape[1])

    def select(self, positions: NDArray[Any] | slice) -> TopTokens:
        """Select positions, in the given order."""
        return TopTokens(token_ids=self.token_ids[positions], logprobs=self.logprobs[positions])

    @staticmethod
    def unknown(num_positions: int, count: int) -> TopTokens:
        """Create positions whose top tokens are unknown."""
        shape = (num_positions, count)
        return TopTokens(token_ids=np.zeros(shape, np.int32), logprobs=np.full(shape, np.nan, np.float32))

    @staticmethod
    def concat(parts: Sequence[TopTokens]) -> TopTokens:
        """Concatenate the positions of the parts, at least one. Raises ValueError if they differ in K."""
        if len(counts := sorted({part.count for part in parts})) != 1:
            raise ValueError(f"all samples must have the same number of top tokens per position, got {counts}")
        return TopTokens(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
        )


def join_top_tokens(parts: Sequence[tuple[TopTokens | None, int]]) -> TopTokens | None:
    """Concatenate parts, given with their numbers of positions; None if no part has top tokens."""
    known = [top for top, _ in parts if top is not None]
    if not known:
        return None
    return TopTokens.concat([TopTokens.unknown(n, known[0].count) if top is None else top for top, n in parts])
