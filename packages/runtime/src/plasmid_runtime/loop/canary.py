"""Compare log-probabilities of trainer and engine on one prompt before training on a new version."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
from plasmid.components import CanaryPlan
from plasmid.errors import EngineError, SyncError
from plasmid.protocols import RolloutEngine, Trainer
from plasmid.types import (
    Completion,
    GenerateRequest,
    Prompt,
    PromptGroup,
    Sample,
    SamplingParams,
    Score,
    StopReason,
    VersionSpan,
)
from plasmid.types.batch import BatchRef
from plasmid.types.shared_groups import LocalStore, store_group
from plasmid.utils.waiting import wait_within

log = logging.getLogger(__name__)
PROMPT = np.arange(5, 21, dtype=np.int32)
"""Arbitrary tokens that exist in every vocabulary."""
SAMPLING = SamplingParams(max_new_tokens=16)


class Canary:
    """Queries the engine after a weight sync, along with the first requests, and the trainer before it trains again.

    Checksums verify the transferred weights; the canary verifies that the engine computes the same as the trainer.
    """

    def __init__(
        self, engine: RolloutEngine, trainer: Trainer, plan: CanaryPlan, *, copies: int, limit_s: float
    ) -> None:
        """``copies``: minimum number of samples in a batch of the trainer, one per rank."""
        self._engine, self._trainer = engine, trainer
        self.plan, self._copies, self._limit_s = plan, copies, limit_s
        self._pending: tuple[int, asyncio.Task[Completion]] | None = None

    def start(self, version: int) -> None:
        """Send the canary request to the engine, which now serves this version."""
        if self._pending is not None:
            self._pending[1].cancel()
            self._pending = None
        if version % self.plan.every:
            return
        self._pending = version, asyncio.create_task(self._generate(version))

    @property
    def pending(self) -> asyncio.Future[Any] | None:
        """Future of the engine's answer; None if there is nothing to check."""
        return None if self._pending is None else self._pending[1]

    async def _generate(self, version: int) -> Completion:
        request = GenerateRequest(
            id=f"canary/{version}#0",
            session_id=f"canary/{version}",
            token_ids=PROMPT,
            sampling=SAMPLING,
            seed=version,
            deadline_s=self._limit_s,
        )
        completion = await self._engine.client.generate(request)
        await self._engine.client.end_sessions([request.session_id])
        if completion.stop_reason is StopReason.ERROR:
            raise EngineError(f"the canary of version {version} failed: {completion.error}")
        return completion

    async def check(self) -> dict[str, float]:
        """Compare both and return metrics; empty if this version has been checked. Raises `SyncError` on a mismatch."""
        if self._pending is None:
            return {}
        version, answer = self._pending
        self._pending = None
        completion = await wait_within(self._limit_s, f"canary of version {version} (run.sync_timeout_s)", answer)
        if len(completion.token_ids) == 0 or {span.version for span in completion.versions} != {version}:
            log.warning("the canary of version %d was aborted before it could be checked", version)
            return {}
        sample = _sample(completion)
        found = (await self._trainer.logprobs(_batch(sample, self._copies)))[0][len(PROMPT) :]
        # compare the mean: with bfloat16 weights, a single improbable token may differ by half a nat
        difference = float(np.abs(found - completion.logprobs).mean())
        if not difference <= self.plan.tolerance:
            raise SyncError(
                f"weight sync of version {version}: trainer and engine differ by {difference:.3g} in the mean "
                f"log-probability of the canary prompt, more than {self.plan.tolerance:g}; the engine does not have "
                "this version, or computes the model differently"
            )
        return {"sync/canary_difference": difference}

    async def close(self) -> None:
        """Cancel the open request."""
        if self._pending is not None:
            self._pending[1].cancel()
            await asyncio.gather(self._pending[1], return_exceptions=True)
            self._pending = None


def _sample(completion: Completion) -> Sample:
    count, given = len(completion.token_ids), len(PROMPT)
    return Sample(
        id="canary",
        rollout_id="canary",
        group_id=0,
        prompt_id="canary",
        token_ids=np.concatenate([PROMPT, completion.token_ids]),
        loss_mask=np.concatenate([np.zeros(given, np.bool_), np.ones(count, np.bool_)]),
        rollout_logprobs=np.concatenate([np.zeros(given, np.float32), completion.logprobs]),
        versions=tuple(
            VersionSpan(version=s.version, start=s.start + given, end=s.end + given) for s in completion.versions
        ),
        sampling=SAMPLING,
        text="",
        stop_reason=completion.stop_reason,
        score=Score(value=0.0),
    )


def _batch(sample: Sample, copies: int) -> BatchRef:
    """Create a batch with a copy of the sample for every rank."""
    prompt = Prompt(id="canary", token_ids=PROMPT)
    groups = [store_group(PromptGroup(id=i, prompt=prompt, samples=(sample,)), LocalStore()) for i in range(copies)]
    return BatchRef(index=0, groups=tuple(groups), steps=1)
