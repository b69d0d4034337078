"""The tokens that top-p, top-k and min-p left to draw from, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptSet:
    """What was left at each of N positions. An empty set stands for the whole vocabulary, and for tokens not drawn."""

    token_ids: NDArray[np.int32]
    """[sum of set sizes] position after position; distinct within a set."""
    offsets: NDArray[np.int64]
    """[N + 1] where each position's set starts."""
    log_mass: NDArray[np.float32]
    """[N] log of the probability that the engine gave to the set, at the sample's temperature; 0 where it is empty."""

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.log_mass) + 1 or self.offsets[-1] != len(self.token_ids):
            raise ValueError(
                f"a kept set of {len(self.log_mass)} positions has {len(self.offsets)} offsets, "
                f"and {len(self.token_ids)} tokens of {self.offsets[-1:].tolist()}"
            )

    @property
    def num_positions(self) -> int:
        """N."""
        return len(self.log_mass)

    def sizes(self) -> NDArray[np.int64]:
        """[N] tokens in each set."""
        return np.diff(self.offsets)

    def select(self, positions: NDArray[np.int64]) -> KeptSet:
        """The sets of some positions, in the given order."""
        sizes = self.offsets[positions + 1] - self.offsets[positions]
        offsets = _offsets(sizes)
        places = np.repeat(self.offsets[positions] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return KeptSet(token_ids=self.token_ids[places], offsets=offsets, log_mass=self.log_mass[positions])

    @staticmethod
    def whole(num_positions: int) -> KeptSet:
        """Positions where nothing was left out."""
        return KeptSet(
            token_ids=np.zeros(0, np.int32),
            offsets=np.zeros(num_positions + 1, np.int64),
            log_mass=np.zeros(num_positions, np.float32),
        )

    @staticmethod
    def of(sets: Sequence[NDArray[np.int32]], log_mass: Sequence[float] | NDArray[Any]) -> KeptSet:
        """From one array of tokens for each position."""
        return KeptSet(
            token_ids=np.concatenate([np.zeros(0, np.int32), *sets]).astype(np.int32),
            offsets=_offsets(np.array([len(tokens) for tokens in sets], np.int64)),
            log_mass=np.asarray(log_mass, np.float32),
        )

    @staticmethod
    def concat(parts: Sequence[KeptSet]) -> KeptSet:
        """All positions of the parts, part after part."""
        none = KeptSet.whole(0)
        return KeptSet(
            token_ids=np.concatenate([none.token_ids, *(part.token_ids for part in parts)]),
            offsets=_offsets(np.concatenate([np.zeros(0, np.int64), *(part.sizes() for part in parts)])),
            log_mass=np.concatenate([none.log_mass, *(part.log_mass for part in parts)]),
        )


def join_kept(parts: Sequence[tuple[KeptSet | None, int]]) -> KeptSet | None:
    """One set from parts with their number of positions; None if no part has one."""
    if all(kept is None for kept, _ in parts):
        return None
    return KeptSet.concat([KeptSet.whole(count) if kept is None else kept for kept, count in parts])


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
