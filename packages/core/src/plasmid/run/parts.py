"""The running parts of one run, and how they are started and stopped."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from ..batch import GroupRef
from ..components import BuildContext
from ..config import RunConfig
from ..errors import ConfigError
from ..protocols import Actor, Cluster, Resources, RolloutEngine, Trainer
from ..rollout.worker import Job, RolloutWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workers:
    """The rollout worker processes; jobs are dealt out to them by group."""

    actors: tuple[Actor, ...]
    timeout_s: float

    async def roll_out(self, job: Job) -> GroupRef:
        """Make one prompt group."""
        actor = self.actors[job.group_id % len(self.actors)]
        group: GroupRef = await actor.call("roll_out", job, timeout_s=self.timeout_s)
        return group

    async def write(self, path: Path, groups: tuple[GroupRef, ...], step: int) -> None:
        """Write whole groups into the sample store."""
        dropped = {group.id: group.dropped_by for group in groups if group.dropped_by}
        refs = [group.whole for group in groups]
        await self.actors[0].call("write", path, refs, step, dropped, timeout_s=600.0)

    async def close(self) -> None:
        """Stop the processes."""
        await asyncio.gather(*(actor.stop() for actor in self.actors))


@dataclass(slots=True, kw_only=True, eq=False)
class Parts:
    """Whatever of trainer, engine and workers a run has."""

    cluster: Cluster
    trainer: Trainer | None = None
    engine: RolloutEngine | None = None
    workers: Workers | None = None

    async def close(self) -> None:
        """Stop everything, the cluster last."""
        for part in (self.workers, self.engine, self.trainer):
            if part is not None:
                try:
                    await part.close()
                except Exception:  # boundary: the others must be stopped too, and why the run ends is said elsewhere
                    log.exception("%s did not close", type(part).__name__)
        await self.cluster.close()


async def start_parts(
    config: RunConfig, cluster: Cluster, run_dir: Path, *, with_trainer: bool, with_engine: bool
) -> Parts:
    """Start what the run needs, all at once. Stops everything again if a part fails."""
    parts = Parts(cluster=cluster)
    try:
        layout = Layout.of(config, cluster.num_gpus, with_trainer=with_trainer, with_engine=with_engine)
        async with asyncio.TaskGroup() as tasks:
            if with_trainer:
                context = layout.context(config, cluster, run_dir, layout.trainer)
                trainer = tasks.create_task(config.trainer.build(context))
            if with_engine and config.rollout is not None:
                context = layout.context(config, cluster, run_dir, layout.engine)
                engine = tasks.create_task(config.rollout.build(context))
        parts.trainer = trainer.result() if with_trainer else None
        if with_engine and config.rollout is not None:
            parts.engine = engine.result()
            parts.workers = await _start_workers(config, cluster, run_dir, parts.engine)
    except ExceptionGroup as group:
        await cluster.close()
        raise group.exceptions[0] from group
    except BaseException:
        await parts.close()
        raise
    return parts


async def _start_workers(config: RunConfig, cluster: Cluster, run_dir: Path, engine: RolloutEngine) -> Workers:
    dump = config.model_dump(mode="json")
    limit = config.placement.start_timeout_s
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}

    async def start(index: int) -> Actor:
        actor = await cluster.start(
            RolloutWorker,
            dump,
            run_dir,
            engine.client,
            cluster.store,
            name=f"rollout-worker-{index}",
            resources=Resources(env=env),
            timeout_s=limit,
        )
        await actor.call("open", timeout_s=limit)
        return actor

    actors = await asyncio.gather(*(start(i) for i in range(config.placement.rollout_workers)))
    longest_reward = sum(reward.timeout_s for reward in config.rewards) * config.run.samples_per_prompt
    return Workers(actors=tuple(actors), timeout_s=config.run.rollout_timeout_s + longest_reward + 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which rank gets which GPU, and how many CPU threads."""

    trainer: tuple[int | None, ...]
    engine: tuple[int | None, ...]
    threads: int

    @staticmethod
    def of(config: RunConfig, num_gpus: int, *, with_trainer: bool, with_engine: bool) -> Layout:
        """Lay trainer and engine ranks out over the GPUs. Raises `ConfigError` if there are too few."""
        place = config.placement
        trainers = place.trainer_ranks if with_trainer else 0
        engines = place.engine_ranks if with_engine else 0
        if place.device == "cpu" or (place.device == "auto" and num_gpus == 0):
            return Layout(
                trainer=(None,) * trainers, engine=(None,) * engines, threads=_threads(config, trainers, engines)
            )
        needed = max(trainers, engines) if place.colocated else trainers + engines
        if needed > num_gpus:
            raise ConfigError(
                f"placement: trainer_ranks = {trainers} and engine_ranks = {engines} need {needed} GPUs, "
                f'this cluster has {num_gpus}; set fewer ranks, colocated = true, or device = "cpu"'
            )
        first = 0 if place.colocated else trainers
        return Layout(
            trainer=tuple(range(trainers)),
            engine=tuple(range(first, first + engines)),
            threads=_threads(config, trainers, engines),
        )

    def context(
        self, config: RunConfig, cluster: Cluster, run_dir: Path, bundles: tuple[int | None, ...]
    ) -> BuildContext:
        """What one part is built with."""
        return BuildContext(cluster=cluster, config=config, run_dir=run_dir, bundles=bundles, threads=self.threads)


def _threads(config: RunConfig, trainers: int, engines: int) -> int:
    """Cores for each rank. On-policy, trainer and engine take turns; else they share the cores."""
    if isinstance(config.placement.threads, int):
        return config.placement.threads
    cores = len(os.sched_getaffinity(0))
    busy = max(trainers, engines) if config.run.max_staleness == 0 else trainers + engines
    return max(1, cores // max(1, busy))
