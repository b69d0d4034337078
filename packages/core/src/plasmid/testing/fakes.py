"""A trainer and an engine without models, for tests of loops, workflows and rewards. No torch, no Ray, milliseconds.

This module is a plugin: name its file under ``plugins`` and choose ``kind = "fake"`` for trainer and rollout.
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
from plasmid.types import BucketSum, SyncReceipt


class FakeTrainerConfig(TrainerConfig):
    """Counts steps; its only weight is their number."""

    kind: Literal["fake"] = "fake"
    seconds: float = Field(0.001, ge=0)
    """Time that one training call takes."""
    write_s: float = Field(0.0, ge=0)
    """Time for which a checkpoint is written while training goes on; 0 writes it at once."""

    async def build(self, context: BuildContext) -> Trainer:
        return FakeTrainer(self.seconds, write_s=self.write_s)


class FakeEngineConfig(RolloutEngineConfig):
    """Answers every request with digits drawn from its seed, after a random delay."""

    kind: Literal["fake"] = "fake"
    max_delay_s: float = Field(0.004, ge=0)
    """Longest time for one request."""
    num_tokens: int = Field(4, ge=1)
    """Length of every completion."""
    fail: tuple[str, ...] = ()
    """Prefixes of session ids whose requests come back with an error."""
    hang: tuple[str, ...] = ()
    """Prefixes of session ids whose requests never come back."""
    corrupt_version: int = -1
    """Version whose weights arrive with another checksum; -1 for none."""

    async def build(self, context: BuildContext) -> RolloutEngine:
        return FakeEngine(self)


class FakeAlgorithm(Algorithm):
    """The likelihood of each sample times its reward. The fake trainer never asks for it."""

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
    """Implements `protocols.Trainer`. Remembers every batch."""

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

    async def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        bucket = BucketSum(index=0, num_bytes=8, checksum=version)
        return SyncReceipt(version=version, num_tensors=1, buckets=(bucket,))

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

    async def offload(self) -> None:
        return None

    async def onload(self) -> None:
        return None

    async def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        return None


class FakeWire:
    """No wire at all: both fakes make up their receipts."""

    senders: Literal["first", "all"] = "first"

    def open(self, *, rank: int, version: int) -> Any:
        raise ValueError("the fake engine receives nothing")


class FakeEngine:
    """Implements `protocols.RolloutEngine` and its client. What it draws depends on a request's seed only."""

    pause_mode: PauseMode = "in_place"

    def __init__(self, settings: FakeEngineConfig) -> None:
        self.version = 0
        self.requests = 0
        self._settings = settings

    @property
    def client(self) -> EngineClient:
        return self

    async def generate(self, request: GenerateRequest) -> Completion:
        draw = random.Random(request.seed)
        self.requests += 1
        if request.session_id.startswith(self._settings.hang) and self._settings.hang:
            await asyncio.sleep(3600)
        version = self.version
        await asyncio.sleep(draw.random() * self._settings.max_delay_s)
        if request.session_id.startswith(self._settings.fail) and self._settings.fail:
            return self._completion(request, [], version, StopReason.ERROR)
        digits = [7 + draw.randrange(10) for _ in range(self._settings.num_tokens)]
        return self._completion(request, digits, version, StopReason.STOP)

    def _completion(self, request: GenerateRequest, ids: list[int], version: int, stop: StopReason) -> Completion:
        return Completion(
            request_id=request.id,
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=(VersionSpan(version=version, start=0, end=len(ids)),) if ids else (),
            stop_reason=stop,
            error="asked to fail" if stop is StopReason.ERROR else None,
        )

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        return None

    async def leave(self, session_ids: Sequence[str]) -> None:
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

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        self.version = version
        checksum = -1 if version == self._settings.corrupt_version else version
        bucket = BucketSum(index=0, num_bytes=8, checksum=checksum)
        return SyncReceipt(version=version, num_tensors=1, buckets=(bucket,))

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
