"""Scheduler: decides which requests run, and when the engine may take a decoding step."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..model.cache import SlotCache
from .row import Row, natural_sort_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Maximum sizes of the running batch."""

    max_batch: int
    prefill_tokens: int
    kv_tokens: int | None
    """None for no limit."""


class Scheduler:
    """Queue of waiting rows and batch of running rows. A row is one request.

    With expected sessions, rows are admitted in the order of request ids, and no step is taken until each of these
    sessions has a request. The composition of the batch then depends only on the set of requests, not on timing.
    """

    def __init__(self, limits: Limits, cache: SlotCache) -> None:
        self._limits = limits
        self._cache = cache
        self._expected: set[str] = set()
        self._missing: set[str] = set()
        self._requests: Counter[str] = Counter()
        self._arrivals = 0
        self._by_id: dict[str, Row] = {}
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        """Row i is in slot i of the cache."""

    @property
    def may_step(self) -> bool:
        """Return False while an expected session has no request."""
        return not self._missing

    def rows(self) -> list[Row]:
        """Return all rows, waiting and running."""
        return list(self._by_id.values())

    def find(self, request_ids: Iterable[str]) -> list[Row]:
        """Return the rows of those requests that have not ended."""
        return [self._by_id[id_] for id_ in request_ids if id_ in self._by_id]

    def expect(self, session_ids: Iterable[str]) -> None:
        """Take no step until each of these sessions has a request."""
        for session in session_ids:
            self._expected.add(session)
            if not self._requests[session]:
                self._missing.add(session)

    def end_sessions(self, session_ids: Iterable[str]) -> None:
        """Stop expecting these sessions."""
        self._expected.difference_update(session_ids)
        self._missing.difference_update(session_ids)

    def add(self, row: Row) -> None:
        """Queue a new row."""
        assert row.request.id not in self._by_id
        self._by_id[row.request.id] = row
        self._arrivals += 1
        session = row.request.session_id
        # rows outside of expected sessions go first, in order of arrival, because no step waits for them
        row.order = (1, *natural_sort_key(row.request.id)) if session in self._expected else (0, self._arrivals)
        bisect.insort(self.waiting, row, key=lambda r: r.order)
        self._requests[session] += 1
        self._missing.discard(session)

    def admit(self) -> list[Row]:
        """Start as many waiting rows as fit into the batch, the cache and one prefill. Returns these rows."""
        admitted: list[Row] = []
        longest = max((row.length for row in self.running), default=0)
        prompts: set[bytes] = set()
        budget = self._limits.prefill_tokens
        while self.waiting and len(self.running) < self._limits.max_batch:
            row = self.waiting[0]
            longest = max(longest, row.length)
            prompt = row.token_ids().tobytes()
            cost = 0 if prompt in prompts else row.length
            if admitted and cost > budget:
                break
            # leave room to grow, or the row would soon be preempted; a single row is always admitted
            if self.running and not self._can_fit(len(self.running) + 1, longest + self._cache.block):
                break
            prompts.add(prompt)
            budget -= cost
            self.running.append(self.waiting.pop(0))
            admitted.append(row)
        return admitted

    def preempt_for_room(self) -> None:
        """Preempt rows, the last in order first, until every running row can grow by one token."""
        while len(self.running) > 1:
            if self._can_fit(len(self.running), max(row.length for row in self.running)):
                return
            last = max(range(len(self.running)), key=lambda i: self.running[i].order)
            self._requeue(self._take_out([last]))

    def preempt_all(self) -> None:
        """Preempt all running rows. They keep their tokens; their cache is recomputed later."""
        rows, self.running = self.running, []
        self._requeue(rows)
        self._cache.clear()

    def _requeue(self, rows: Iterable[Row]) -> None:
        for row in rows:
            bisect.insort(self.waiting, row, key=lambda r: r.order)

    def _can_fit(self, rows: int, tokens: int) -> bool:
        limit = self._limits.kv_tokens
        return limit is None or self._cache.tokens_for(rows, tokens) <= limit

    def remove(self, rows: Sequence[Row]) -> None:
        """Remove rows, waiting or running."""
        removed = set(map(id, rows))
        self.waiting = [row for row in self.waiting if id(row) not in removed]
        self._take_out([i for i, row in enumerate(self.running) if id(row) in removed])
        for row in rows:
            del self._by_id[row.request.id]
            self._forget(row.request.session_id)
        if not self.running:
            self._cache.clear()

    def _forget(self, session: str) -> None:
        self._requests[session] -= 1
        if not self._requests[session]:
            del self._requests[session]
            if session in self._expected:
                self._missing.add(session)

    def _take_out(self, slots: Sequence[int]) -> list[Row]:
        """Remove and return the rows in these slots, and move the last running rows into the free slots."""
        taken = []
        for slot in sorted(slots, reverse=True):
            taken.append(self.running[slot])
            last = self.running.pop()
            if slot < len(self.running):
                self._cache.move(len(self.running), slot, last.length)
                self.running[slot] = last
        return taken
