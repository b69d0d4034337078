"""Engine ``bigram``: one process, its client, the wire of its weight sync, and the handle that the loop uses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from plasmid import BuildContext, Completion, GenerateRequest, StopReason, VersionSpan
from plasmid.errors import SyncError
from plasmid.protocols import Actor, Bucket, PauseMode, Resources, SyncPlan, call
from plasmid.types import BucketSum, SyncResult
from plasmid_models.folder import read_config
from plasmid_models.sync import checksum, unpack
from torch import Tensor

from .model import NAME, read_weight
from .plugin import BigramEngineConfig

ANSWER_S = 600.0
"""Time limit of all calls of the engine's process, in seconds."""


@dataclass
class Row:
    """A request, and its tokens so far with their log-probabilities and policy versions."""

    request: GenerateRequest
    tokens: list[tuple[int, float, int]] = field(default_factory=list)

    def completion(self, stop: StopReason) -> Completion:
        ids, logprobs, versions = zip(*self.tokens, strict=True) if self.tokens else ((), (), ())
        starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
        ends = [*starts[1:], len(versions)]
        return Completion(
            request_id=self.request.id,
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=tuple(
                VersionSpan(version=versions[a], start=a, end=b) for a, b in zip(starts, ends, strict=False)
            ),
            stop_reason=stop,
        )


@dataclass
class Update:
    """A weight sync in progress. Tensors replace those in use when all of them have arrived."""

    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sums: list[BucketSum] = field(default_factory=list)
    result: asyncio.Future[SyncResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class BigramWorker:
    """The engine's process. All methods run on one event loop."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._weight = read_weight("model", folder).to(getattr(torch, dtype))
        self._end = read_config("model", folder).get("eos_token_id")
        self._version, self._tokens = 0, 0
        self._rows: dict[str, Row] = {}
        self._aborted: set[str] = set()
        self._serves = asyncio.Event()
        self._serves.set()
        self._update: Update | None = None
        self._failed_sync = ""

    async def generate(self, request: GenerateRequest) -> Completion:
        row = self._rows[request.id] = Row(request)
        sampling = request.sampling
        ends = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [self._end])}
        last = int(request.token_ids[-1])
        try:
            async with asyncio.timeout(request.deadline_s):
                while request.num_generated + len(row.tokens) < sampling.max_new_tokens:
                    await asyncio.sleep(0)  # lets other requests, pauses and weights in between
                    if request.id in self._aborted:
                        return row.completion(StopReason.ABORT)
                    await self._serves.wait()
                    last, logprob = self._sample(last, request, request.num_generated + len(row.tokens))
                    row.tokens.append((last, logprob, self._version))
                    if last in ends:
                        return row.completion(StopReason.STOP)
            return row.completion(StopReason.LENGTH)
        finally:
            del self._rows[request.id]
            self._aborted.discard(request.id)

    def _sample(self, last: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        """Return the next token and its log-probability; they depend only on ``last``, the seed and the position."""
        logits = self._weight[last].float() / request.sampling.scoring_temperature
        logprobs = logits.log_softmax(-1).numpy().astype(np.float64)
        if request.sampling.temperature == 0:
            token = int(logprobs.argmax())
        else:
            draw = np.random.default_rng([request.seed, position]).random()
            token = min(int(np.exp(logprobs).cumsum().searchsorted(draw, side="right")), len(logprobs) - 1)
        self._tokens += 1
        return token, min(float(logprobs[token]), 0.0)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        self._aborted |= self._rows.keys() & (self._rows.keys() if request_ids == "all" else set(request_ids))

    async def fetch_partial(self, request_ids: Sequence[str]) -> list[Completion]:
        return [self._rows[id_].completion(StopReason.ABORT) for id_ in request_ids if id_ in self._rows]

    async def pause(self) -> None:
        self._serves.clear()

    async def resume(self) -> None:
        if self._failed_sync:
            raise SyncError(self._failed_sync)
        self._serves.set()

    async def begin_update(self) -> str:
        self._update = Update()
        return self._update.token

    async def put(self, token: str, bucket: Bucket) -> None:
        """Keep a bucket, and the checksum of the bytes that have arrived."""
        update, found = self._updating(token), checksum(bucket.data)
        update.sums.append(BucketSum(index=bucket.index, num_bytes=bucket.data.numel(), checksum=found))
        if found != bucket.checksum:
            self._fail(f"bucket {bucket.index} has checksum {found:016x}, expected {bucket.checksum:016x}")
        update.tensors |= dict(unpack(bucket))

    async def finish_update(self, token: str, version: int, ok: bool) -> None:
        """Use the new weights from the next token on."""
        update = self._updating(token)
        new = update.tensors.get(NAME)
        if not ok or new is None or len(update.tensors) > 1:
            self._fail("the trainer stopped sending" if not ok else f"expected {NAME!r}, got {sorted(update.tensors)}")
        elif (new.shape, new.dtype) != (self._weight.shape, self._weight.dtype):
            self._fail(f"{NAME} has {new.dtype} {tuple(new.shape)}")
        else:
            self._weight, self._version, self._failed_sync = new, version, ""
            update.result.set_result(SyncResult(version=version, num_tensors=1, buckets=tuple(update.sums)))

    def _updating(self, token: str) -> Update:
        if self._update is None or self._update.token != token or self._update.result.done():
            raise SyncError("the weight sync is over")
        return self._update

    def _fail(self, reason: str) -> None:
        assert self._update is not None, "called during an update"
        self._failed_sync = f"weight sync: {reason}"
        if not self._update.result.done():
            self._update.result.set_exception(SyncError(self._failed_sync))
        raise SyncError(self._failed_sync)

    async def receive(self, limit_s: float) -> SyncResult:
        assert self._update is not None, "`plan_sync` comes first"
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(self._update.result)
        except TimeoutError:
            self._fail(f"not complete within {limit_s:g} s")
            raise

    async def checksums(self) -> dict[str, int]:
        return {NAME: checksum(self._weight)}

    async def metrics(self) -> dict[str, float]:
        return {"engine/running": float(len(self._rows)), "engine/new_tokens": float(self._tokens)}


@dataclass(frozen=True)
class BigramClient:
    """Implements `EngineClient`. Only holds the handle of the process, so it can be pickled to rollout workers."""

    actor: Actor

    async def generate(self, request: GenerateRequest) -> Completion:
        return await call(self.actor, request.deadline_s + ANSWER_S, BigramWorker.generate, request)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        await call(self.actor, ANSWER_S, BigramWorker.abort, request_ids)

    async def fetch_partial(self, request_ids: Sequence[str]) -> Sequence[Completion]:
        return await call(self.actor, ANSWER_S, BigramWorker.fetch_partial, request_ids)

    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """Do nothing: the process keeps nothing of a session."""

    async def disconnect(self) -> None:
        """Do nothing: an actor has no connections to close."""


@dataclass(frozen=True)
class BigramWire:
    """Implements `Wire`: rank 0 sends buckets to the engine's process. Pickled to the trainer's ranks."""

    actor: Actor
    token: str
    senders: Literal["first", "all", "divided"] = "first"

    def open(self, *, rank: int, version: int) -> BigramSender:
        return BigramSender(self, version)


@dataclass(frozen=True)
class BigramSender:
    """Implements `Sender`, in the process of a trainer's rank, which has no event loop."""

    wire: BigramWire
    version: int

    def send(self, bucket: Bucket) -> None:
        asyncio.run(call(self.wire.actor, ANSWER_S, BigramWorker.put, self.wire.token, bucket))

    def close(self, *, ok: bool) -> None:
        finish = BigramWorker.finish_update
        asyncio.run(call(self.wire.actor, ANSWER_S, finish, self.wire.token, self.version, ok))


class BigramEngine:
    """Implements `RolloutEngine`, in the driver."""

    pause_mode: PauseMode = "in_place"

    def __init__(self, actor: Actor, settings: BigramEngineConfig, *, sync_timeout_s: float) -> None:
        self._actor, self._settings, self._sync_timeout_s = actor, settings, sync_timeout_s
        self.client = BigramClient(actor)

    def needs_weights(self) -> bool:
        return False

    async def expect(self, session_ids: Sequence[str]) -> None:
        """Do nothing: requests are never batched, so the order of their arrival has no effect."""

    async def pause(self, mode: PauseMode) -> None:
        await self._call(BigramWorker.pause)

    async def resume(self) -> None:
        await self._call(BigramWorker.resume)

    async def plan_sync(self) -> SyncPlan:
        wire = BigramWire(self._actor, await self._call(BigramWorker.begin_update))
        return SyncPlan(wire=wire, dtype=self._settings.dtype, bucket_bytes=self._settings.bucket_bytes)

    async def receive(self, plan: SyncPlan, version: int) -> SyncResult:
        limit_s = self._sync_timeout_s
        return await call(self._actor, limit_s + ANSWER_S, BigramWorker.receive, limit_s)

    async def checksum(self) -> Mapping[str, int]:
        return await self._call(BigramWorker.checksums)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Do nothing: the engine has no GPU memory."""

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Do nothing: the engine has no GPU memory."""

    async def health(self) -> None:
        await self._call(BigramWorker.metrics)

    async def metrics(self) -> Mapping[str, float]:
        return await self._call(BigramWorker.metrics)

    async def close(self) -> None:
        await self._actor.stop()

    async def _call(self, method: Any, *arguments: Any) -> Any:
        return await call(self._actor, ANSWER_S, method, *arguments)


async def start_engine(settings: BigramEngineConfig, context: BuildContext) -> BigramEngine:
    """Start the process, on the first bundle of the placement."""
    actor = await context.cluster.start(
        BigramWorker,
        Path(context.config.model.path).absolute(),
        settings.dtype,
        name=f"{context.engine_name}-0",
        resources=Resources(bundles=context.bundles[:1], env={"OMP_NUM_THREADS": str(context.threads)}),
        timeout_s=context.config.placement.start_timeout_s,
    )
    return BigramEngine(actor, settings, sync_timeout_s=context.config.run.sync_timeout_s)
