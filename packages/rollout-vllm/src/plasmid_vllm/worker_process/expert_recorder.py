"""Experts that a vLLM worker chose for each token, by request.

vLLM itself returns them only with its newer model runner, whose sampler cannot be replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from plasmid.types.routing import Experts, Routing, get_unknown_id
from torch import Tensor

Slots = NDArray[np.int64]
"""Places of tokens in the KV cache."""


class Copied(Protocol):
    """Event that is set once rows are in host memory."""

    def query(self) -> bool:
        """Return whether they are."""

    def synchronize(self) -> None:
        """Wait for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTokens:
    """Consecutive tokens of one request that a step computes."""

    name: str | None
    """Name under which the experts are taken; None for requests that do not want them."""
    wanted_from: int
    """First token whose experts are wanted."""
    start: int
    """Position of the first token."""
    slots: Slots
    """Slots of all tokens of the request up to the last of these."""


@dataclass(slots=True)
class _Step:
    rows: Tensor
    copied: Copied | None
    reads: list[tuple[str, Slots, slice]]
    """For each request that wants experts: slots of cached tokens, and rows of tokens of this step."""
    slots: Slots


@dataclass(slots=True)
class _Request:
    end: int
    """Token before which all experts are recorded."""
    parts: list[Experts] = field(default_factory=list)


class ExpertRecorder:
    """Collects experts step by step. Tokens of a cached prefix have the experts with which it was computed.

    If tokens are computed again, as after a preemption, the experts of the first time remain.
    """

    def __init__(self, routing: Routing, *, num_slots: int, block_size: int) -> None:
        """``num_slots``: size of the KV cache in tokens. Its first block stands for blocks that are not kept."""
        self.routing = routing
        self._table = np.zeros((num_slots, routing.layers, routing.choices), routing.dtype)
        self._table[:block_size] = get_unknown_id(routing.dtype)
        self._block_size = block_size
        self._requests: dict[str, _Request] = {}
        self._steps: deque[_Step] = deque()

    def add(self, rows: Tensor, copied: Copied | None, tokens: Sequence[ScheduledTokens]) -> None:
        """Record a step from its ``rows`` [n, layers, choices], which are valid when ``copied`` is set."""
        reads, offset = [], 0
        for one in tokens:
            count = len(one.slots) - one.start
            if one.name is not None:
                request = self._requests.setdefault(one.name, _Request(one.wanted_from))
                known, stop = request.end, len(one.slots)
                if stop > known:
                    fresh = slice(offset + max(0, known - one.start), offset + count)
                    reads.append((one.name, one.slots[known : one.start], fresh))
                    request.end = stop
            offset += count
        slots = np.concatenate([one.slots[one.start :] for one in tokens])
        self._steps.append(_Step(rows, copied, reads, slots))
        while self._steps and (self._steps[0].copied is None or self._steps[0].copied.query()):
            self._store(self._steps.popleft())

    def _store(self, step: _Step) -> None:
        rows = step.rows.numpy()[: len(step.slots)].astype(self.routing.dtype)
        kept = step.slots >= self._block_size
        self._table[step.slots[kept]] = rows[kept]  # before it is read: requests share prefixes within a step
        for name, cached, fresh in step.reads:
            request = self._requests.get(name)
            if request is not None:
                request.parts += [self._table[cached], rows[fresh]]

    def take(self, name: str, count: int) -> Experts:
        """Remove a request, and return the experts of up to ``count`` tokens."""
        while self._steps:
            step = self._steps.popleft()
            if step.copied is not None:
                step.copied.synchronize()
            self._store(step)
        request = self._requests.pop(name, None)
        parts = [self.routing.rows(0)] if request is None else [self.routing.rows(0), *request.parts]
        return np.concatenate(parts)[:count]
