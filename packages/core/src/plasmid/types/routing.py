"""Routed experts: the experts that an engine chose for each token, by layer of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[Any]
"""[n, layers, choices] expert ids of n tokens, uint8 or uint16; `get_unknown_id()` if not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a mixture of experts routes a token."""

    layers: int
    """Number of decoder layers. Layers without experts have zeros as expert ids."""
    choices: int
    """Number of experts that each layer chooses for a token."""
    experts: int
    """Number of experts of a layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest dtype for expert ids and `get_unknown_id`."""
        return np.dtype(np.uint8 if self.experts < np.iinfo(np.uint8).max else np.uint16)

    def rows(self, count: int) -> Experts:
        """Create experts of ``count`` tokens, all unknown."""
        return np.full((count, self.layers, self.choices), get_unknown_id(self.dtype), self.dtype)


def get_unknown_id(dtype: np.dtype[Any]) -> int:
    """Return the id that stands for experts that were not recorded."""
    return int(np.iinfo(dtype).max)


def fill_unknown(experts: Experts, found: Experts, *, end: int) -> None:
    """Write ``found``, the experts of the tokens before ``end``, where ``experts`` has none yet."""
    found = found[max(0, len(found) - end) :]
    target = experts[end - len(found) : end]
    is_open = target[:, 0, 0] == get_unknown_id(experts.dtype)
    target[is_open] = found[is_open]


def join_experts(parts: Sequence[tuple[Experts | None, int]]) -> Experts | None:
    """Concatenate parts, given with their numbers of tokens; None if no part has experts."""
    known = next((experts for experts, _ in parts if experts is not None), None)
    if known is None:
        return None
    shape, none = known.shape[1:], get_unknown_id(known.dtype)
    return np.concatenate([np.full((n, *shape), none, known.dtype) if e is None else e for e, n in parts])
