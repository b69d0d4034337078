"""A trainer and an engine without models, for fast tests of loops, workflows and rewards without torch and Ray.

This module is a plugin file: list it under ``plugins`` and set ``kind = "fake"`` for trainer and rollout.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from plasmid import (
    Algorithm,
    BatchRef,
    BuildContext,
    Completion,
    Component,
    EngineClient,
    GenerateRequest,
    Needs,
    Role,
    RolloutEngine,
    RolloutEngineConfig,
    StopReason,
    Trainer,
    TrainerConfig,
    VersionSpan,
    hookimpl,
)
from plasmid.components.objective_inputs import AdvantageInputs, LossInputs, TokenLoss
from plasmid.protocols import Finish, PauseMode, ScoresRef, SyncPlan, TrainReport, Wire
from plasmid.types import BucketSum, SyncResult


class FakeTrainerConfig(TrainerConfig):
    """A trainer whose only state is its number of optimizer steps."""

    kind: Literal["fake"] = "fake"
    seconds: float = Field(0.001, ge=0)
    """Duration of one training call, in seconds."""
    write_s: float = Field(0.0, ge=0)
    """Time to write a checkpoint in the background, in seconds; 0 writes it before `save` returns."""

    async def build(self, context: BuildContext) -> Trainer:
        return FakeTrainer(self.seconds, write_s=self.write_s)


class FakeEngineConfig(RolloutEngineConfig):
    """Answers every request with digits drawn from its seed, after a random delay."""

    kind: Literal["fake"] = "fake"
    max_delay_s: float = Field(0.004, ge=0)
    """Maximum duration of a request, in seconds; its tokens are generated at even intervals."""
    num_tokens: int = Field(4, ge=1)
    """Length of every completion, in tokens."""
    fail: tuple[str, ...] = ()
    """Prefixes of session ids whose requests return an error."""
    hang: tuple[str, ...] = ()
    """Prefixes of session ids whose requests never return."""
    corrupt_version: int = -1
    """Policy version whose weights arrive with a wrong checksum; -1 for none."""

    async def build(self, context: BuildContext) -> RolloutEngine:
        return FakeEngine(self)


class FakeAlgorithm(Algorithm):
    """Loss: log-probability of each sample times its reward. The fake trainer never calls it."""

    kind: Literal["fake"] = "fake"

    def needs(self) -> Needs:
        return Needs()

    def roles(self, *, steps: int) -> tuple[Role, ...]:
        return ()

    def advantages(self, inputs: AdvantageInputs) -> Any:
        return inputs.spread(inputs.table.rewards)

    def loss(self, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(loss=-inputs.advantages * inputs.logprobs, metrics={})


class FakeTrainer:
    """Implements `protocols.Trainer` and records every batch."""

    def __init__(self, seconds: float = 0.001, *, write_s: float = 0.0) -> None:
        self.step = 0
        self.batches: list[BatchRef] = []
        self._seconds, self._write_s = seconds, write_s

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        return ScoresRef(batch=batch.index, roles=tuple(roles))

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        await asyncio.sleep(self._seconds)
        self.batches.append(batch)
        self.step += batch.steps
        loss = float(sum(group.rewards.sum() for group in batch.groups)) + self.step
        return TrainReport(steps=({"train/loss": loss, "train/grad_norm": 1.0},) * batch.steps)

    async def logprobs(self, batch: BatchRef) -> tuple[Any, ...]:
        return tuple(np.zeros(length, np.float32) for group in batch.groups for length in group.lengths)

    async def send(self, plan: SyncPlan, version: int) -> SyncResult:
        bucket = BucketSum(index=0, num_bytes=8, checksum=version)
        return SyncResult(version=version, num_tensors=1, buckets=(bucket,))

    async def save(self, path: Path) -> Finish | None:
        path.mkdir(parents=True)
        state = json.dumps({"step": self.step})

        async def write() -> None:
            await asyncio.sleep(self._write_s)
            (path / "fake.json").write_text(state)

        if self._write_s:
            return write
        await write()
        return None

    async def load(self, path: Path) -> None:
        self.step = json.loads((path / "fake.json").read_text())["step"]

    async def export(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "fake.json").write_text(json.dumps({"step": self.step}))

    async def offload(self) -> None:
        return None

    async def onload(self) -> None:
        return None

    async def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        return None


class FakeWire:
    """Implements `protocols.Wire` without a transfer: both fakes return synthetic results."""

    senders: Literal["first", "all", "divided"] = "first"

    def open(self, *, rank: int, version: int) -> Any:
        raise ValueError("the fake engine receives no weights")


class _FakeRow:
    """A request and its tokens so far, each with log-probability and policy version."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens: list[tuple[int, float, int]] = []

    @property
    def position(self) -> int:
        return self.request.num_generated + len(self.tokens)

    def completion(self, stop: StopReason) -> Completion:
        versions = [version for _, _, version in self.tokens]
        starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
        ends = [*starts[1:], len(versions)]
        spans = zip(starts, ends, strict=False)
        return Completion(
            request_id=self.request.id,
            token_ids=np.array([token for token, _, _ in self.tokens], np.int32),
            logprobs=np.array([logprob for _, logprob, _ in self.tokens], np.float32),
            versions=tuple(VersionSpan(version=versions[start], start=start, end=end) for start, end in spans),
            stop_reason=stop,
            error="asked to fail" if stop is StopReason.ERROR else None,
        )


class FakeEngine:
    """Implements `protocols.RolloutEngine` and its client. Completions depend only on the request's seed."""

    pause_mode: PauseMode = "in_place"

    def __init__(self, settings: FakeEngineConfig) -> None:
        self.version = 0
        self.requests = 0
        self._settings = settings
        self._running: dict[str, _FakeRow] = {}

    @property
    def client(self) -> EngineClient:
        return self

    async def generate(self, request: GenerateRequest) -> Completion:
        draw = random.Random(request.seed)
        self.requests += 1
        pause_s = draw.random() * self._settings.max_delay_s / self._settings.num_tokens
        digits = [7 + draw.randrange(10) for _ in range(self._settings.num_tokens)]
        row = self._running[request.id] = _FakeRow(request)
        try:
            if request.session_id.startswith(self._settings.hang) and self._settings.hang:
                await asyncio.sleep(3600)
            for digit in digits[request.num_generated :]:
                version = self.version
                await asyncio.sleep(pause_s)
                row.tokens.append((digit, self.logprob(request, row.position), version))
        finally:
            del self._running[request.id]
        failed = request.session_id.startswith(self._settings.fail) and bool(self._settings.fail)
        return _FakeRow(request).completion(StopReason.ERROR) if failed else row.completion(StopReason.STOP)

    def logprob(self, request: GenerateRequest, position: int) -> float:
        """Return the log-probability of the token at this position of the completion."""
        return -0.5

    async def fetch_partial(self, request_ids: Sequence[str]) -> Sequence[Completion]:
        rows = [self._running[id_] for id_ in request_ids if id_ in self._running]
        return [row.completion(StopReason.ABORT) for row in rows]

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        return None

    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        return None

    async def disconnect(self) -> None:
        return None

    def needs_weights(self) -> bool:
        return False

    async def expect(self, session_ids: Sequence[str]) -> None:
        return None

    async def pause(self, mode: PauseMode) -> None:
        return None

    async def resume(self) -> None:
        return None

    async def plan_sync(self) -> SyncPlan:
        wire: Wire = FakeWire()
        return SyncPlan(wire=wire)

    async def receive(self, plan: SyncPlan, version: int) -> SyncResult:
        self.version = version
        checksum = -1 if version == self._settings.corrupt_version else version
        bucket = BucketSum(index=0, num_bytes=8, checksum=checksum)
        return SyncResult(version=version, num_tensors=1, buckets=(bucket,))

    async def checksum(self) -> Mapping[str, int]:
        return {"step": self.version}

    async def sleep(self, *, keep_weights: bool = True) -> None:
        return None

    async def wake(self, *, kv_cache: bool = True) -> None:
        return None

    async def health(self) -> None:
        return None

    async def metrics(self) -> Mapping[str, float]:
        return {"engine/requests": float(self.requests)}

    async def close(self) -> None:
        return None


@hookimpl
def register_components() -> list[type[Component]]:
    return [FakeTrainerConfig, FakeEngineConfig, FakeAlgorithm]
