"""Score samples by a teacher outside of the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
from plasmid.errors import EngineError
from plasmid.protocols import TeacherClient
from plasmid.types import Sample, StopReason


async def add_teacher_logprobs(client: TeacherClient, samples: Sequence[Sample], *, deadline_s: float) -> list[Sample]:
    """Return the samples with `Sample.teacher_logprobs`. A sample that the teacher does not score fails."""

    async def score(sample: Sample, first: int, end: int) -> Sample:
        values = np.zeros(len(sample.token_ids), np.float32)
        if first < end:
            values[first:end] = await client.score(sample.token_ids[:end], first=first, deadline_s=deadline_s)
        values[~sample.loss_mask] = 0.0
        return replace(sample, teacher_logprobs=values)

    return await _score_all(score, samples)


async def add_teacher_top(client: TeacherClient, samples: Sequence[Sample], *, deadline_s: float) -> list[Sample]:
    """Return the samples with `Sample.teacher_top`; None without loss tokens. A sample that is not scored fails."""

    async def score(sample: Sample, first: int, end: int) -> Sample:
        if first == end:
            return sample
        found = await client.score_top(sample.token_ids[:end], first=first, deadline_s=deadline_s)
        return replace(sample, teacher_top=found.select(np.flatnonzero(sample.loss_mask) - first))

    return await _score_all(score, samples)


async def _score_all(score: Callable[[Sample, int, int], Awaitable[Sample]], samples: Sequence[Sample]) -> list[Sample]:
    """Call ``score`` with each sample and the span of its loss tokens, which is empty if there are none to score."""

    async def one(sample: Sample) -> Sample:
        trained = np.flatnonzero(sample.loss_mask)
        if sample.stop_reason is StopReason.ERROR or not len(trained):
            return await score(sample, 0, 0)
        started = time.monotonic()
        try:
            scored = await score(sample, max(1, int(trained[0])), int(trained[-1]) + 1)
        except EngineError as error:
            return replace(sample, stop_reason=StopReason.ERROR, error=str(error))
        return replace(scored, timings={**sample.timings, "teacher_s": time.monotonic() - started})

    return list(await asyncio.gather(*map(one, samples)))
