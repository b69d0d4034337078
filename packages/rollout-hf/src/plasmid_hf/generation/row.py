"""State of one request in the engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from plasmid.types import Completion, GenerateRequest, Ints, StopReason, VersionSpan
from plasmid.types.kept_sets import KeptSet
from plasmid.types.routing import Experts
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .sampler import KeptTokens

COPIED = ("tokens", "logprobs", "versions", "kept", "experts")
"""Fields of a row that grow with every token."""
SortKey = tuple[str | int, ...]


def natural_sort_key(text: str) -> SortKey:
    """Return a key that sorts numbers inside texts by value: ``9/1`` before ``10/0``."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", text)))


class StopTexts:
    """Detects stop texts token by token."""

    def __init__(self, texts: tuple[str, ...], tokenizer: Tokenizer) -> None:
        self._texts = texts
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tail = ""

    def add(self, token_id: int) -> bool:
        """Return whether this token completes one of the texts."""
        text = self._stream.step(self._tokenizer, token_id)
        if not text:
            return False  # an incomplete character that spans several tokens
        self._tail += text
        found = any(stop in self._tail for stop in self._texts)
        self._tail = self._tail[-max(len(stop) for stop in self._texts) :]
        return found


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A request, the tokens generated for it in this call, and its position."""

    request: GenerateRequest
    done: Callable[[Completion], None]
    """Called once with the completion, in the engine's thread."""
    stop_ids: frozenset[int]
    stop_texts: StopTexts | None
    max_length: int
    """Number of tokens, prompt included, at which the row ends."""
    order: SortKey = ()
    """Sort key of the order of admission."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[KeptTokens] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    """Experts of the tokens from ``request.experts_from``, in parts."""
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    prefilled: float = 0.0

    @property
    def deadline(self) -> float:
        """Return the deadline on the monotonic clock."""
        return self.arrived + self.request.deadline_s

    @property
    def length(self) -> int:
        """Return the number of tokens so far, prompt included."""
        return len(self.request.token_ids) + len(self.tokens)

    @property
    def position(self) -> int:
        """Return the index of the next token, counted from the first generated token of the whole request."""
        return self.request.num_generated + len(self.tokens)

    def token_ids(self) -> Ints:
        """Return all tokens so far [length], including the prompt."""
        return np.concatenate([np.asarray(self.request.token_ids, np.int32), np.array(self.tokens, np.int32)])

    def add(self, token_id: int, logprob: float, version: int, kept: KeptTokens | None) -> StopReason | None:
        """Append a token. Returns the stop reason if the row ends with this token, else None."""
        self.tokens.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if kept is not None:
            self.kept.append(kept)
        complete = self.stop_texts is not None and self.stop_texts.add(token_id)
        if complete or token_id in self.stop_ids:
            return StopReason.STOP
        return StopReason.LENGTH if self.is_full() else None

    def add_experts(self, experts: Experts | None, first: int) -> None:
        """Record the experts of the tokens from position ``first`` on, if requested. Ignores tokens that have some."""
        routing = self.request.routing
        if routing is not None and experts is not None:
            known = self.request.experts_from + sum(map(len, self.experts))
            self.experts.append(experts[max(0, known - first) :].astype(routing.dtype))

    def is_full(self) -> bool:
        """Return whether no further token is allowed."""
        return self.position >= self.request.sampling.max_new_tokens or self.length >= self.max_length

    def finish(self, reason: StopReason, error: str | None = None) -> None:
        """Deliver the completion."""
        self.done(self.completion(reason, error))

    def copy(self) -> Row:
        """Return a copy of the row that later steps do not change."""
        lists: dict[str, Any] = {name: list(getattr(self, name)) for name in COPIED}
        return replace(self, **lists)

    def completion(self, reason: StopReason, error: str | None = None) -> Completion:
        """Return the completion with the tokens generated so far."""
        return Completion(
            request_id=self.request.id,
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=version_spans(self.versions),
            stop_reason=reason,
            error=error,
            kept=self._join_kept_sets() if self.request.wants_kept_set else None,
            experts=self._experts(),
            timings=self._timings(time.monotonic()),
        )

    def _join_kept_sets(self) -> KeptSet:
        return KeptSet.of([kept.token_ids for kept in self.kept], [kept.log_mass for kept in self.kept])

    def _experts(self) -> Experts | None:
        routing = self.request.routing
        return None if routing is None else np.concatenate([routing.rows(0), *self.experts])

    def _timings(self, now: float) -> dict[str, float]:
        admitted = self.admitted or now
        prefilled = self.prefilled or now
        return {
            "queued_s": admitted - self.arrived,
            "prefill_s": prefilled - admitted,
            "decode_s": now - prefilled,
        }


def version_spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    """Group consecutive equal policy versions into spans."""
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple(VersionSpan(version=versions[s], start=s, end=e) for s, e in zip(starts, ends, strict=False))
