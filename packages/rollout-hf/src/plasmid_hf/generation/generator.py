"""The step loop: each step prefills new requests or decodes one token for every running row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from plasmid.types import Completion, GenerateRequest, StopReason
from tokenizers import Tokenizer
from torch import Tensor

from ..model.cache import SlotCache
from ..model.language_model import LanguageModel
from .row import Row, StopTexts
from .sampler import Sampler
from .scheduler import Limits, Scheduler

Words = NDArray[np.uint64]
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Compute Philox4x32-10 of four counter words and two key words, each an array of 32-bit values.

    Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3. NumPy's Philox4x64 has one state per stream; here
    each row needs one number at a given position of its own stream, for many rows in one call.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _SHIFT) ^ c1 ^ k0, second & _LOW, (first >> _SHIFT) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return c0, c1, c2, c3


def draw_uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return numbers [n] in [0, 1), one for each pair of seed (its lowest 64 bits) and position."""
    seed = np.array([value & (2**64 - 1) for value in seeds], np.uint64)
    position = np.array(positions, np.uint64)
    zero = np.zeros_like(position)
    high, low, _, _ = philox((position & _LOW, position >> _SHIFT, zero, zero), (seed & _LOW, seed >> _SHIFT))
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))  # 53 bits, the precision of a double
    return bits.astype(np.float64) * 2.0**-53


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counters since the start."""

    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0


class Generator:
    """Owns the rows, their cache and the model. Not thread-safe: call everything from one thread."""

    def __init__(
        self,
        model: LanguageModel,
        limits: Limits,
        *,
        kv_block: int,
        max_length: int,
        tokenizer: Tokenizer | None,
        version: int = 0,
    ) -> None:
        self.model = model
        self.cache = SlotCache(num_layers=model.facts.num_layers, block=kv_block, max_rows=limits.max_batch)
        self.scheduler = Scheduler(limits, self.cache)
        self.counts = Counts()
        self.version = version
        """Policy version of the weights; recorded with every token."""
        self._max_length = max_length
        self._tokenizer = tokenizer
        self._sampled: tuple[Row, ...] = ()
        self._sampler: Sampler | None = None

    def submit(self, request: GenerateRequest, done: Callable[[Completion], None]) -> None:
        """Queue a request, or fail it immediately if it cannot be served."""
        self.counts.requests += 1
        sampling = request.sampling
        row = Row(
            request=request,
            done=done,
            stop_ids=self.model.facts.stop_ids.union(sampling.stop_token_ids),
            stop_texts=self._stop_texts(request),
            max_length=self._max_length,
        )
        error = self._request_error(request)
        if error:
            row.finish(StopReason.ERROR, error)
        elif row.is_full():
            row.finish(StopReason.LENGTH)
        else:
            self.scheduler.add(row)

    def _stop_texts(self, request: GenerateRequest) -> StopTexts | None:
        if not request.sampling.stop or self._tokenizer is None:
            return None
        texts = StopTexts(request.sampling.stop, self._tokenizer)
        for token_id in request.token_ids[len(request.token_ids) - request.num_generated :]:
            texts.add(int(token_id))
        return texts

    def _request_error(self, request: GenerateRequest) -> str | None:
        """Return why a request cannot be served; None if it can."""
        length, size = len(request.token_ids), self.model.facts.vocab_size
        if self.scheduler.find([request.id]):
            return f"request {request.id} is already running; request ids must be unique"
        if length == 0:
            return "the prompt is empty"
        if length > self._max_length:
            return f"the prompt has {length} tokens, the maximum is {self._max_length}"
        low, high = int(request.token_ids.min()), int(request.token_ids.max())
        if low < 0 or high >= size:
            return f"the prompt contains token {low if low < 0 else high}, outside of the vocabulary of {size} tokens"
        if request.sampling.stop and self._tokenizer is None:
            return "stop texts require a tokenizer.json in the model folder; use stop_token_ids"
        return None

    def step(self, *, may_admit: bool = True) -> bool:
        """Run one forward pass if there is work and every expected session has a request."""
        scheduler = self.scheduler
        if not scheduler.may_step or not (scheduler.running or (may_admit and scheduler.waiting)):
            return False
        started = time.monotonic()
        first = len(scheduler.running)
        admitted = scheduler.admit() if may_admit else []
        if admitted:
            self._prefill(admitted, first)
        else:
            self._decode()
        self.counts.steps += 1
        self.counts.busy_s += time.monotonic() - started
        return True

    def _prefill(self, rows: list[Row], first: int) -> None:
        now = time.monotonic()
        for row in rows:
            row.admitted = row.admitted or now
        sequences = [row.token_ids() for row in rows]
        self.counts.prompt_tokens += sum(map(len, sequences))
        with self.model.recorder.record_pass(any(row.request.routing for row in rows)) as recorded:
            logits = self.model.prefill(self.cache, sequences, first_slot=first)
        for row, experts in zip(rows, recorded, strict=False):
            row.add_experts(experts, 0)
        self._draw(rows, logits)
        for row in rows:
            row.prefilled = row.prefilled or time.monotonic()

    def _decode(self) -> None:
        self.scheduler.preempt_for_room()
        rows = self.scheduler.running
        last = [row.tokens[-1] for row in rows]
        with self.model.recorder.record_pass(any(row.request.routing for row in rows)) as recorded:
            logits = self.model.decode(self.cache, last, [row.length - 1 for row in rows])
        for row, experts in zip(rows, recorded, strict=False):
            row.add_experts(experts, row.length - 1)
        self._draw(list(rows), logits)

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> None:
        drawn = self._sampler_for(rows).draw(
            logits, draw_uniforms([row.request.seed for row in rows], [row.position for row in rows])
        )
        self.counts.new_tokens += len(rows)
        finished: list[tuple[Row, StopReason, str | None]] = []
        results = zip(rows, drawn.token_ids.tolist(), drawn.logprobs.tolist(), drawn.kept, strict=True)
        for row, token_id, logprob, kept in results:
            if not logprob > float("-inf"):
                finished.append((row, StopReason.ERROR, f"the model's logits after token {row.length} are not finite"))
                continue
            reason = row.add(token_id, logprob, self.version, kept)
            if reason is not None:
                finished.append((row, reason, None))
        self.scheduler.remove([row for row, _, _ in finished])
        for row, reason, error in finished:
            row.finish(reason, error)

    def _sampler_for(self, rows: Sequence[Row]) -> Sampler:
        if self._sampler is None or tuple(rows) != self._sampled:
            self._sampled = tuple(rows)
            self._sampler = Sampler(
                [row.request.sampling for row in rows],
                wants_kept=[row.request.wants_kept_set for row in rows],
                device=self.model.device,
            )
        return self._sampler

    def end(self, rows: Sequence[Row], reason: StopReason, error: str | None = None) -> None:
        """Deliver rows with the tokens that they have generated so far."""
        self.scheduler.remove(rows)
        for row in rows:
            row.finish(reason, error)

    def expire(self) -> float | None:
        """End rows past their deadline. Returns the seconds until the next deadline, None without rows."""
        now = time.monotonic()
        late = [row for row in self.scheduler.rows() if row.deadline <= now]
        for row in late:
            self.end([row], StopReason.ERROR, f"not finished within the deadline of {row.request.deadline_s:g} s")
        return min((row.deadline - now for row in self.scheduler.rows()), default=None)
