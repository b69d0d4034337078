"""Kept sets: the candidate tokens that top-p, top-k and min-p left at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptSet:
    """Candidate tokens at N positions. An empty set means the whole vocabulary, or a token that was not generated."""

    token_ids: NDArray[np.int32]
    """[sum of set sizes] concatenated sets, without duplicates within a set."""
    offsets: NDArray[np.int64]
    """[N + 1] start of each position's set."""
    log_mass: NDArray[np.float32]
    """[N] log of the total probability of the set by the engine, at the sample's temperature; 0 for an empty set."""

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.log_mass) + 1 or self.offsets[-1] != len(self.token_ids):
            raise ValueError(
                f"a kept set of {len(self.log_mass)} positions must have one more offset, the last of which is "
                f"its {len(self.token_ids)} tokens, got {len(self.offsets)} offsets that end with "
                f"{self.offsets[-1:].tolist()}"
            )

    @property
    def num_positions(self) -> int:
        """N."""
        return len(self.log_mass)

    def sizes(self) -> NDArray[np.int64]:
        """Return the number of tokens in each set, as [N]."""
        return np.diff(self.offsets)

    def select(self, positions: NDArray[np.int64]) -> KeptSet:
        """Select positions, in the given order."""
        sizes = self.offsets[positions + 1] - self.offsets[positions]
        offsets = _offsets(sizes)
        places = np.repeat(self.offsets[positions] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return KeptSet(token_ids=self.token_ids[places], offsets=offsets, log_mass=self.log_mass[positions])

    @staticmethod
    def whole(num_positions: int) -> KeptSet:
        """Create positions without restrictions."""
        return KeptSet(
            token_ids=np.zeros(0, np.int32),
            offsets=np.zeros(num_positions + 1, np.int64),
            log_mass=np.zeros(num_positions, np.float32),
        )

    @staticmethod
    def of(sets: Sequence[NDArray[np.int32]], log_mass: Sequence[float] | NDArray[Any]) -> KeptSet:
        """Create kept sets from one array of tokens per position."""
        return KeptSet(
            token_ids=np.concatenate([np.zeros(0, np.int32), *sets]).astype(np.int32),
            offsets=_offsets(np.array([len(tokens) for tokens in sets], np.int64)),
            log_mass=np.asarray(log_mass, np.float32),
        )

    @staticmethod
    def concat(parts: Sequence[KeptSet]) -> KeptSet:
        """Concatenate the positions of all parts."""
        none = KeptSet.whole(0)
        return KeptSet(
            token_ids=np.concatenate([none.token_ids, *(part.token_ids for part in parts)]),
            offsets=_offsets(np.concatenate([np.zeros(0, np.int64), *(part.sizes() for part in parts)])),
            log_mass=np.concatenate([none.log_mass, *(part.log_mass for part in parts)]),
        )


def join_kept(parts: Sequence[tuple[KeptSet | None, int]]) -> KeptSet | None:
    """Concatenate parts, given with their numbers of positions; None if no part has kept sets."""
    if all(kept is None for kept, _ in parts):
        return None
    return KeptSet.concat([KeptSet.whole(count) if kept is None else kept for kept, count in parts])


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
