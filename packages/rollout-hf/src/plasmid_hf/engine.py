"""The engine as the training loop uses it: one process per rank, behind one handle."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from plasmid.components import BuildContext
from plasmid.errors import ConfigError, SyncError
from plasmid.protocols import Actor, AdapterSync, Bundle, PauseMode, Resources, SyncPlan, call
from plasmid.types import SyncResult

from .client import ANSWER_S, HFClient
from .process.worker import EngineWorker, WorkerOptions
from .sender import HFWire
from .settings import HF

P = ParamSpec("P")
T = TypeVar("T")


class HFEngine:
    """Implements `RolloutEngine` on top of running engine processes."""

    def __init__(
        self,
        actors: Sequence[Actor],
        settings: HF,
        *,
        dtype: str,
        sync_timeout_s: float,
        has_adapter: bool = False,
        num_senders: int = 1,
    ) -> None:
        """Wrap running processes. With ``has_adapter`` they hold a base model and a LoRA adapter.

        ``num_senders`` is the number of trainer ranks, which divide the weights of a sync among them.
        """
        self._actors = tuple(actors)
        self._has_adapter, self._has_base = has_adapter, False
        self._settings = settings
        self._dtype = dtype
        self._sync_timeout_s, self._num_senders = sync_timeout_s, num_senders
        self._client = HFClient(self._actors)

    @property
    def client(self) -> HFClient:
        """Return the client for rollout workers."""
        return self._client

    @property
    def pause_mode(self) -> PauseMode:
        """Return the mode in which the training loop pauses the engine before a weight sync."""
        return self._settings.pause_mode

    def needs_weights(self) -> bool:
        """Return False: a process that dies ends the run."""
        return False

    async def expect(self, session_ids: Sequence[str]) -> None:
        """Batch the requests of these sessions reproducibly: see `RolloutEngine.expect`."""
        sessions = list(session_ids)
        engines = [0] * len(sessions)
        if len(self._actors) > 1:
            engines = await call(self._actors[0], ANSWER_S, EngineWorker.route, sessions)
        for index, actor in enumerate(self._actors):
            own = [session for session, engine in zip(sessions, engines, strict=True) if engine == index]
            if own:
                await call(actor, ANSWER_S, EngineWorker.expect, own)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating in every process."""
        await self._all(EngineWorker.pause, mode)

    async def resume(self) -> None:
        """Undo `pause`. Raises `SyncError` if the last weight sync is incomplete."""
        await self._all(EngineWorker.resume)

    async def plan_sync(self) -> SyncPlan:
        """Plan one weight sync, in which every trainer rank sends its share of the buckets to every process."""
        wire = HFWire(
            actors=self._actors,
            token=uuid.uuid4().hex,
            timeout_s=self._sync_timeout_s,
            num_senders=self._num_senders,
            senders="first" if self._num_senders == 1 else "divided",
        )
        way: AdapterSync = "merged"
        if self._has_adapter:
            way = "alone" if self._has_base else "with_base"
        return SyncPlan(wire=wire, dtype=self._dtype, bucket_bytes=self._settings.bucket_bytes, adapter=way)

    async def receive(self, plan: SyncPlan, version: int) -> SyncResult:
        """Update every process. Raises `SyncError`; the engine then refuses requests until an update succeeds."""
        wire = plan.wire
        if not isinstance(wire, HFWire):
            raise SyncError(f"weight sync of version {version}: engine 'hf' does not support {type(wire).__name__}")
        limit_s = wire.timeout_s
        results = await asyncio.gather(
            *(call(a, limit_s + 60, EngineWorker.receive, wire.token, version, limit_s) for a in self._actors)
        )
        for actor, result in zip(self._actors, results, strict=True):
            if (result.num_tensors, result.buckets) != (results[0].num_tensors, results[0].buckets):
                raise SyncError(
                    f"weight sync of version {version}: {actor.name} and {self._actors[0].name} received different "
                    "bytes"
                )
        self._has_base = True
        return max(results, key=lambda result: result.seconds)

    async def checksum(self) -> Mapping[str, int]:
        """Compute checksums of all tensors in the live model. Raises `SyncError` if processes differ."""
        found = await self._all(EngineWorker.checksums)
        for actor, sums in zip(self._actors, found, strict=True):
            if sums != found[0]:
                name = next(name for name in found[0] if sums.get(name) != found[0][name])
                raise SyncError(f"tensor {name!r} of {actor.name} differs from that of {self._actors[0].name}")
        return found[0]

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Drop the KV caches and move the weights to host memory, regardless of ``keep_weights``."""
        await self._all(EngineWorker.sleep)

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Move the weights back. Without ``kv_cache`` generation does not resume yet."""
        await self._all(EngineWorker.wake, kv_cache)

    async def health(self) -> None:
        """Raise `EngineError` if a process cannot serve."""
        await self._all(EngineWorker.health)

    async def metrics(self) -> Mapping[str, float]:
        """Sum the metrics over the processes."""
        found = await self._all(EngineWorker.metrics)
        return {name: sum(gauges[name] for gauges in found) for name in found[0]}

    async def close(self) -> None:
        """Stop the processes."""
        await asyncio.gather(*(actor.stop() for actor in self._actors))

    async def _all(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        limit_s = max(ANSWER_S, self._sync_timeout_s)
        return await asyncio.gather(*(call(actor, limit_s, method, *args, **kwargs) for actor in self._actors))


async def start_engine(settings: HF, context: BuildContext) -> HFEngine:
    """Start one process per rank of the placement."""
    config = context.config
    own, theirs = settings.number_type(on_gpu=context.on_gpu), getattr(config.trainer, "dtype", "auto")
    if config.run.deterministic and theirs not in ("auto", own):
        raise ConfigError(
            f"rollout.dtype: must equal trainer.dtype = {theirs!r} with run.deterministic, got {own!r}; set it to "
            f"{theirs!r}"
        )

    async def start(index: int, bundle: Bundle) -> Actor:
        options = WorkerOptions(
            settings=settings,
            model=config.model,
            adapter=config.trainer.adapter(),
            deterministic=config.run.deterministic,
            on_gpu=context.on_gpu,
            threads=context.threads,
            num_engines=len(context.bundles),
        )
        limit_s = config.placement.start_timeout_s
        actor = await context.cluster.start(
            EngineWorker,
            options,
            name=f"{context.engine_name}-{index}",
            resources=Resources(
                bundles=(bundle,),
                env={"OMP_NUM_THREADS": str(context.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            ),
            timeout_s=limit_s,
        )
        await call(actor, limit_s, EngineWorker.load)
        return actor

    actors = await asyncio.gather(*(start(i, bundle) for i, bundle in enumerate(context.bundles)))
    dtype = settings.number_type(on_gpu=context.on_gpu)
    return HFEngine(
        actors,
        settings,
        dtype=dtype,
        sync_timeout_s=config.run.sync_timeout_s,
        has_adapter=config.trainer.adapter() is not None,
        num_senders=config.placement.trainer_ranks,
    )
