"""Which requests run, and when the engine may take a step at all."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..model.cache import SlotCache
from .row import Row, natural_sort_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much runs at once."""

    max_batch: int
    prefill_tokens: int
    kv_tokens: int | None
    """None for no limit."""


class Scheduler:
    """Waiting rows in order, running rows by slot, and the sessions that were promised.

    With promised (expected) sessions the order of admission is that of request ids and a step waits until every one of
    them has a request, so that which rows run together follows from the set of requests alone.
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
        """False while an expected session has no request."""
        return not self._missing

    def rows(self) -> list[Row]:
        """Every row."""
        return list(self._by_id.values())

    def find(self, request_ids: Iterable[str]) -> list[Row]:
        """The rows of those requests that are still here."""
        return [self._by_id[id_] for id_ in request_ids if id_ in self._by_id]

    def expect(self, session_ids: Iterable[str]) -> None:
        """Take no step without a request from each of these."""
        for session in session_ids:
            self._expected.add(session)
            if not self._requests[session]:
                self._missing.add(session)

    def leave(self, session_ids: Iterable[str]) -> None:
        """Expect these no longer."""
        self._expected.difference_update(session_ids)
        self._missing.difference_update(session_ids)

    def add(self, row: Row) -> None:
        """Queue a new row."""
        assert row.request.id not in self._by_id
        self._by_id[row.request.id] = row
        self._arrivals += 1
        session = row.request.session_id
        # others go first, first come first served: nobody can wait for them reproducibly
        row.order = (1, *natural_sort_key(row.request.id)) if session in self._expected else (0, self._arrivals)
        bisect.insort(self.waiting, row, key=lambda r: r.order)
        self._requests[session] += 1
        self._missing.discard(session)

    def admit(self) -> list[Row]:
        """Move the next rows from waiting to running: as many as slots, cache and one prefill have room for."""
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
            # room to grow, or the row would be sent back right away; one row alone always fits
            if self.running and not self._fits(len(self.running) + 1, longest + self._cache.block):
                break
            prompts.add(prompt)
            budget -= cost
            self.running.append(self.waiting.pop(0))
            admitted.append(row)
        return admitted

    def preempt_for_room(self) -> None:
        """Send the last rows back to the queue until every running one can grow by a token."""
        while len(self.running) > 1:
            if self._fits(len(self.running), max(row.length for row in self.running)):
                return
            last = max(range(len(self.running)), key=lambda i: self.running[i].order)
            self._requeue(self._take_out([last]))

    def preempt_all(self) -> None:
        """Send every running row back to the queue; its tokens stay, its cache is computed again."""
        rows, self.running = self.running, []
        self._requeue(rows)
        self._cache.clear()

    def _requeue(self, rows: Iterable[Row]) -> None:
        for row in rows:
            bisect.insort(self.waiting, row, key=lambda r: r.order)

    def _fits(self, rows: int, tokens: int) -> bool:
        limit = self._limits.kv_tokens
        return limit is None or self._cache.tokens_for(rows, tokens) <= limit

    def remove(self, rows: Sequence[Row]) -> None:
        """Take rows out, wherever they are."""
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
        """Remove running rows; the last ones move into their slots."""
        taken = []
        for slot in sorted(slots, reverse=True):
            taken.append(self.running[slot])
            last = self.running.pop()
            if slot < len(self.running):
                self._cache.move(len(self.running), slot, last.length)
                self.running[slot] = last
        return taken
