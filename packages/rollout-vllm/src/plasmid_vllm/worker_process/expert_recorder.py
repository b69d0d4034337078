"""Record of the experts that a vLLM worker chose for each token, by request.

vLLM itself returns the experts only with its newer model runner, whose sampler cannot be replaced.
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
"""Slots of tokens in the KV cache, [n]."""


class Copied(Protocol):
    """Event that is set once rows are in host memory."""

    def query(self) -> bool:
        """Return whether the rows are in host memory."""

    def synchronize(self) -> None:
        """Wait until they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTokens:
    """Consecutive tokens of one request that a step computes."""

    name: str | None
    """Name to take the experts by; None for a request whose experts are not needed."""
    wanted_from: int
    """Position of the first token whose experts are needed."""
    start: int
    """Position of the first of the tokens."""
    count: int
    blocks: Sequence[int]
    """Blocks of the KV cache with the tokens of the request, from position 0 on."""
    num_kept: int | None = None
    """Number of tokens that a preempted request kept: vLLM may drop those that were sampled last."""


@dataclass(slots=True)
class _Step:
    rows: Tensor
    copied: Copied | None
    reads: list[_Read]
    slots: Slots


@dataclass(frozen=True, slots=True)
class _Read:
    """Where to find the experts that a step adds to a request."""

    name: str
    end: int
    """Position before which earlier steps have recorded the experts; vLLM dropped any later tokens."""
    cached: Slots
    """Slots of tokens that were computed for other requests."""
    fresh: slice
    """Rows of tokens that the step computed."""


@dataclass(slots=True)
class _Request:
    start: int
    """Position of the first token whose experts are needed."""
    end: int
    """Position before which all needed experts are recorded."""
    parts: list[Experts] = field(default_factory=list)
    """Experts from ``start`` on."""
    stored: int = 0
    """Number of tokens in ``parts``."""

    def extend(self, read: _Read, table: Experts, rows: Experts) -> None:
        """Add the experts of a step."""
        if self.stored > (kept := read.end - self.start):
            self.parts, self.stored = [np.concatenate(self.parts)[:kept]], kept
        for part in (table[read.cached], rows[read.fresh]):
            if len(part):
                self.parts.append(part)
                self.stored += len(part)


class ExpertRecorder:
    """Collects the experts of each step. Tokens of a cached prefix get the experts chosen when it was computed.

    If the tokens of a request are computed again, as after a preemption, it keeps the experts of the first time.
    """

    def __init__(self, routing: Routing, *, num_slots: int, block_size: int) -> None:
        """``num_slots``: size of the KV cache in tokens. vLLM's first block stands for blocks that it does not keep."""
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
            if one.name is not None:
                request = self._requests.setdefault(one.name, _Request(one.wanted_from, one.wanted_from))
                known = request.end
                if one.num_kept is not None:
                    known = max(request.start, min(known, one.num_kept))
                fresh = slice(offset + max(0, known - one.start), offset + one.count)
                reads.append(_Read(one.name, known, self._slots(one, known, one.start), fresh))
                request.end = max(known, one.start + one.count)
            offset += one.count
        slots = np.concatenate([self._slots(one, one.start, one.start + one.count) for one in tokens])
        self._steps.append(_Step(rows, copied, reads, slots))
        while self._steps and (self._steps[0].copied is None or self._steps[0].copied.query()):
            self._store(self._steps.popleft())

    def _slots(self, tokens: ScheduledTokens, start: int, stop: int) -> Slots:
        """Return the slots of the tokens from ``start`` to ``stop`` of a request."""
        first = start // self._block_size
        blocks = np.array(tokens.blocks[first : -(-stop // self._block_size)], np.int64)
        positions = np.arange(start, stop)
        slots: Slots = blocks[positions // self._block_size - first] * self._block_size + positions % self._block_size
        return slots

    def _store(self, step: _Step) -> None:
        rows = step.rows.numpy()[: len(step.slots)].astype(self.routing.dtype)
        kept = step.slots >= self._block_size
        self._table[step.slots[kept]] = rows[kept]  # before it is read: requests share prefixes within a step
        for read in step.reads:
            request = self._requests.get(read.name)
            if request is not None:
                request.extend(read, self._table, rows)

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
