"""Completions that a client makes itself. Engines' settings import this module, so it must not import aiohttp."""

from __future__ import annotations

import numpy as np
from plasmid.types import Completion, GenerateRequest, StopReason
from plasmid.types.kept_sets import KeptSet

STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
"""Stop reasons, by their names in the responses of servers."""


def empty_completion(request: GenerateRequest, reason: StopReason, error: str | None = None) -> Completion:
    """Return a completion without tokens."""
    return Completion(
        request_id=request.id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=(),
        kept=KeptSet.whole(0) if request.wants_kept_set else None,
        experts=None if request.routing is None else request.routing.rows(0),
        stop_reason=reason,
        error=error,
    )


def failed_completion(request: GenerateRequest, error: str) -> Completion:
    """Return the completion of a failed request."""
    return empty_completion(request, StopReason.ERROR, error)
