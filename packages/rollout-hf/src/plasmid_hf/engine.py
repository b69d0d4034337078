"""The engine as the loop sees it: one process for each rank, behind one handle."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from plasmid.components import BuildContext
from plasmid.errors import SyncError
from plasmid.protocols import Actor, Bundle, PauseMode, Resources, SyncPlan
from plasmid.types import SyncReceipt

from .client import ANSWER_S, HFClient
from .process.worker import EngineWorker, WorkerOptions
from .settings import HF
from .weight_sync.sender import HFWire


class HFEngine:
    """Implements `RolloutEngine` over the processes that it was started with."""

    def __init__(self, actors: Sequence[Actor], settings: HF, *, dtype: str, sync_timeout_s: float) -> None:
        self._actors = tuple(actors)
        self._settings = settings
        self._dtype = dtype
        self._sync_timeout_s = sync_timeout_s
        self._client = HFClient(self._actors)

    @property
    def client(self) -> HFClient:
        """What rollout workers talk to."""
        return self._client

    @property
    def pause_mode(self) -> PauseMode:
        """What the loop asks of `pause` before a weight sync."""
        return self._settings.pause_mode

    def needs_weights(self) -> bool:
        """False: a process that has died ends the run."""
        return False

    async def expect(self, session_ids: Sequence[str]) -> None:
        """Batch the requests of these sessions reproducibly: see `RolloutEngine.expect`."""
        sessions = list(session_ids)
        engines = [0] * len(sessions)
        if len(self._actors) > 1:
            engines = await self._actors[0].call("route", sessions, timeout_s=ANSWER_S)
        for index, actor in enumerate(self._actors):
            own = [session for session, engine in zip(sessions, engines, strict=True) if engine == index]
            if own:
                await actor.call("expect", own, timeout_s=ANSWER_S)

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens in every process."""
        await self._all("pause", mode)

    async def resume(self) -> None:
        """Undo `pause`. Raises `SyncError` while the last weight sync is not complete."""
        await self._all("resume")

    async def plan_sync(self) -> SyncPlan:
        """A plan for one weight sync: buckets of bytes from the first rank to every process."""
        wire = HFWire(actors=self._actors, token=uuid.uuid4().hex, timeout_s=self._sync_timeout_s)
        return SyncPlan(wire=wire, dtype=self._dtype, bucket_bytes=self._settings.bucket_bytes)

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Update every process. Raises `SyncError`; the engine then refuses to serve until an update has succeeded."""
        wire = plan.wire
        if not isinstance(wire, HFWire):
            raise SyncError(f"weight sync of version {version}: engine 'hf' cannot receive by {type(wire).__name__}")
        limit_s = wire.timeout_s
        calls = [actor.call("receive", wire.token, version, limit_s, timeout_s=limit_s + 60) for actor in self._actors]
        receipts: list[SyncReceipt] = await asyncio.gather(*calls)
        for actor, receipt in zip(self._actors, receipts, strict=True):
            if (receipt.num_tensors, receipt.buckets) != (receipts[0].num_tensors, receipts[0].buckets):
                raise SyncError(
                    f"weight sync of version {version}: {actor.name} received other bytes than {self._actors[0].name}"
                )
        return max(receipts, key=lambda receipt: receipt.seconds)

    async def checksum(self) -> Mapping[str, int]:
        """Checksums of every tensor, read back from the live model. Raises `SyncError` if processes differ."""
        found: list[Mapping[str, int]] = await self._all("checksums")
        for actor, sums in zip(self._actors, found, strict=True):
            if sums != found[0]:
                name = next(name for name in found[0] if sums.get(name) != found[0][name])
                raise SyncError(f"tensor {name!r} of {actor.name} differs from that of {self._actors[0].name}")
        return found[0]

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Drop the KV caches and move the weights to host memory, in any case."""
        await self._all("sleep")

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Bring the weights back; without ``kv_cache`` nothing is drawn yet."""
        await self._all("wake", kv_cache)

    async def health(self) -> None:
        """Raises `EngineError` if a process cannot serve."""
        await self._all("health")

    async def metrics(self) -> Mapping[str, float]:
        """Sums over the processes."""
        found: list[Mapping[str, float]] = await self._all("metrics")
        return {name: sum(gauges[name] for gauges in found) for name in found[0]}

    async def close(self) -> None:
        """Stop the processes."""
        await asyncio.gather(*(actor.stop() for actor in self._actors))

    async def _all(self, method: str, *args: Any) -> list[Any]:
        limit_s = max(ANSWER_S, self._sync_timeout_s)
        return list(await asyncio.gather(*(actor.call(method, *args, timeout_s=limit_s) for actor in self._actors)))


async def start_engine(settings: HF, context: BuildContext) -> HFEngine:
    """Start one process for each rank of the placement."""
    config, model = context.config, context.config.model

    async def start(index: int, bundle: Bundle) -> Actor:
        options = WorkerOptions(
            settings=settings,
            model_path=model.path,
            tokenizer_path=model.tokenizer_path,
            trust_remote_code=model.trust_remote_code,
            max_length=model.max_length,
            on_gpu=context.on_gpu,
            threads=context.threads,
            num_engines=len(context.bundles),
        )
        return await context.cluster.start(
            EngineWorker,
            options,
            name=f"{context.engine_name}-{index}",
            resources=Resources(
                bundles=(bundle,),
                env={"OMP_NUM_THREADS": str(context.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            ),
            timeout_s=config.placement.start_timeout_s,
        )

    actors = await asyncio.gather(*(start(i, bundle) for i, bundle in enumerate(context.bundles)))
    dtype = settings.dtype if settings.dtype != "auto" else "bfloat16" if context.on_gpu else "float32"
    return HFEngine(actors, settings, dtype=dtype, sync_timeout_s=config.run.sync_timeout_s)
