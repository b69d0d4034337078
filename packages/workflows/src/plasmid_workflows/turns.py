"""The requests of a rollout with their sampled tokens, which checkpoints store so that a rollout can resume."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from plasmid.protocols import EngineClient
from plasmid.types import Completion, GenerateRequest, StopReason, VersionSpan
from plasmid.types.kept_sets import join_kept
from plasmid.utils.waits.ledger import LEDGER


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A request of a rollout, and the tokens sampled for it before a checkpoint."""

    rollout_id: str
    number: int
    """Index of the request in its rollout, from 0."""
    seed: int
    request_hash: str
    """`hash_request`: a resumed rollout that sends a different request cannot use the tokens."""
    completion: Completion
    """Has stop reason ``abort`` if the request had not ended."""


@dataclass(slots=True, eq=False)
class TurnState:
    """A request of a running rollout, and the parts into which aborts have split its completion."""

    number: int
    request: GenerateRequest
    parts: list[Completion] = field(default_factory=list)
    answer: asyncio.Future[Completion] | None = None
    """The engine's pending answer to the request in progress."""

    async def draw(self, client: EngineClient) -> Completion:
        """Generate until the request has ended.

        After an abort, continues after the tokens so far, under the newer policy. Starts again without them if
        probabilities depend on the earlier tokens of the request (`SamplingParams.is_altered`).
        """
        while not self.has_ended:
            if self.request.sampling.is_altered:
                self.parts.clear()
            self.answer = asyncio.ensure_future(client.generate(self._remaining_request()))
            with LEDGER.enter(f"engine: request {self.request.id}", self.request.deadline_s):
                self.parts.append(await self.answer)
            self.answer = None
        return join_completions(self.parts)

    @property
    def has_ended(self) -> bool:
        """Return whether no tokens are left to generate."""
        return bool(self.parts) and self.parts[-1].stop_reason is not StopReason.ABORT

    def _remaining_request(self) -> GenerateRequest:
        drawn = [part.token_ids for part in self.parts]
        if not drawn:
            return self.request
        so_far = np.concatenate([self.request.token_ids, *drawn])
        known = sum(len(part.experts) for part in self.parts if part.experts is not None)
        return replace(
            self.request,
            token_ids=so_far,
            num_generated=len(so_far) - len(self.request.token_ids),
            experts_from=self.request.experts_from + known,
        )

    def record(self, partial: Completion | None) -> Turn | None:
        """Return the tokens so far, including ``partial`` of the request in progress; None if there are none."""
        parts = [part for part in self.parts if part.stop_reason is not StopReason.ERROR]
        if partial is not None:
            parts.append(partial)
        is_open = bool(parts) and parts[-1].stop_reason is StopReason.ABORT
        if not parts or (is_open and (self.request.sampling.is_altered or not any(len(p.token_ids) for p in parts))):
            return None
        return Turn(
            rollout_id=self.request.session_id,
            number=self.number,
            seed=self.request.seed,
            request_hash=hash_request(self.request),
            completion=join_completions(parts),
        )


def hash_request(request: GenerateRequest) -> str:
    """Hash everything except the policy that determines the tokens of a request."""
    tokens = np.ascontiguousarray(request.token_ids, np.int32).tobytes()
    about = f"{request.seed} {request.wants_kept_set} {request.sampling.model_dump_json()} "
    about += "" if request.routing is None else f"{request.routing} {request.experts_from} "
    return hashlib.blake2b(about.encode() + tokens, digest_size=16).hexdigest()


def join_completions(parts: Sequence[Completion]) -> Completion:
    """Join the parts of a completion that was split by aborts."""
    if len(parts) == 1:
        return parts[0]
    spans: list[VersionSpan] = []
    position = 0
    for part in parts:
        for span in part.versions:
            if spans and spans[-1].version == span.version:
                spans[-1] = replace(spans[-1], end=span.end + position)
            else:
                spans.append(span.shift(position))
        position += len(part.token_ids)
    experts = [part.experts for part in parts if part.experts is not None]
    timings: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.timings.items():
            timings[name] = timings.get(name, 0.0) + seconds
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=tuple(spans),
        kept=join_kept([(part.kept, len(part.token_ids)) for part in parts]),
        experts=np.concatenate(experts) if experts else None,
        timings=timings,
    )
