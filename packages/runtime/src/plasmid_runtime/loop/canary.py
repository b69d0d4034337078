"""Compares log-probabilities of trainer and engine on one prompt before a new version is trained on."""

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
from plasmid.types.shared_groups import LocalStore, share
from plasmid.utils.waiting import within

log = logging.getLogger(__name__)
PROMPT = np.arange(5, 21, dtype=np.int32)
"""Any tokens will do that every vocabulary has."""
SAMPLING = SamplingParams(max_new_tokens=16)


class Canary:
    """Asks the engine after a weight sync, beside the first requests, and the trainer before it trains again.

    Checksums prove what crossed the wire; this proves that the engine computes with it as the trainer does.
    """

    def __init__(
        self, engine: RolloutEngine, trainer: Trainer, plan: CanaryPlan, *, copies: int, limit_s: float
    ) -> None:
        """``copies``: samples that a batch of the trainer must have at least, one for each rank."""
        self._engine, self._trainer = engine, trainer
        self.plan, self._copies, self._limit_s = plan, copies, limit_s
        self._asked: tuple[int, asyncio.Task[Completion]] | None = None

    def ask(self, version: int) -> None:
        """The engine serves this version now."""
        if self._asked is not None:
            self._asked[1].cancel()
            self._asked = None
        if version % self.plan.every:
            return
        self._asked = version, asyncio.create_task(self._generate(version))

    @property
    def asked(self) -> asyncio.Future[Any] | None:
        """Done when the engine has answered; None if there is nothing to check."""
        return None if self._asked is None else self._asked[1]

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
        await self._engine.client.leave([request.session_id])
        if completion.stop_reason is StopReason.ERROR:
            raise EngineError(f"the canary of version {version} failed: {completion.error}")
        return completion

    async def check(self) -> dict[str, float]:
        """Raises `SyncError` if they differ by too much. Metrics; none if this version has been checked."""
        if self._asked is None:
            return {}
        version, asked = self._asked
        self._asked = None
        completion = await within(self._limit_s, f"canary of version {version} (run.sync_timeout_s)", asked)
        if len(completion.token_ids) == 0 or {span.version for span in completion.versions} != {version}:
            log.warning("the canary of version %d was cut off before it was of use", version)
            return {}
        sample = _sample(completion)
        found = (await self._trainer.logprobs(_batch(sample, self._copies)))[0][len(PROMPT) :]
        # the mean: with weights of bfloat16 a single improbable token may differ by half a nat
        difference = float(np.abs(found - completion.logprobs).mean())
        if not difference <= self.plan.tolerance:
            raise SyncError(
                f"weight sync of version {version}: trainer and engine differ by {difference:.3g} in the mean "
                f"log-probability of a canary, {self.plan.tolerance:g} is allowed; the engine does not hold this "
                "version, or does not compute this model as the trainer does"
            )
        return {"sync/canary_difference": difference}

    async def close(self) -> None:
        """Cancel the open request."""
        if self._asked is not None:
            self._asked[1].cancel()
            await asyncio.gather(self._asked[1], return_exceptions=True)
            self._asked = None


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
    """The sample once for every rank."""
    prompt = Prompt(id="canary", token_ids=PROMPT)
    groups = [share(PromptGroup(id=i, prompt=prompt, samples=(sample,)), LocalStore()) for i in range(copies)]
    return BatchRef(index=0, groups=tuple(groups), steps=1)
