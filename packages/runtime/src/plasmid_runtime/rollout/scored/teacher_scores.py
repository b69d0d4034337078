"""Score samples by a teacher outside of the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from plasmid.errors import EngineError
from plasmid.protocols import TeacherClient
from plasmid.types import Sample, StopReason


async def with_teacher_logprobs(client: TeacherClient, samples: Sequence[Sample], *, deadline_s: float) -> list[Sample]:
    """Return the samples with `Sample.teacher_logprobs`. A sample that the teacher does not score fails."""
    return list(await asyncio.gather(*(_score(client, sample, deadline_s) for sample in samples)))


async def _score(client: TeacherClient, sample: Sample, deadline_s: float) -> Sample:
    trained = np.flatnonzero(sample.loss_mask)
    values = np.zeros(len(sample.token_ids), np.float32)
    if sample.stop_reason is StopReason.ERROR or not len(trained):
        return replace(sample, teacher_logprobs=values)
    first, end = max(1, int(trained[0])), int(trained[-1]) + 1
    started = time.monotonic()
    try:
        values[first:end] = await client.score(sample.token_ids[:end], first=first, deadline_s=deadline_s)
    except EngineError as error:
        return replace(sample, stop_reason=StopReason.ERROR, error=str(error))
    values[~sample.loss_mask] = 0.0
    timings = {**sample.timings, "teacher_s": time.monotonic() - started}
    return replace(sample, teacher_logprobs=values, timings=timings)
