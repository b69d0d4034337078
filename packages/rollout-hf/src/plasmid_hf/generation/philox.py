"""Counter-based random numbers: what is drawn depends on a seed and a position, never on what was drawn before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of four counter words and two key words, each an array of 32-bit values.

    Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _SHIFT) ^ c1 ^ k0, second & _LOW, (first >> _SHIFT) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """[n] numbers in [0, 1), one for each pair of seed (64 bits count) and position."""
    seed = np.array([value & (2**64 - 1) for value in seeds], np.uint64)
    position = np.array(positions, np.uint64)
    zero = np.zeros_like(position)
    high, low, _, _ = philox((position & _LOW, position >> _SHIFT, zero, zero), (seed & _LOW, seed >> _SHIFT))
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))  # 53 bits: as many as a double holds
    return bits.astype(np.float64) * 2.0**-53
