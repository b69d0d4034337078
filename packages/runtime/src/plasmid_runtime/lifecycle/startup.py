"""The running parts of one run, and how they are started and stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from plasmid.components import BuildContext
from plasmid.config.run import RunConfig
from plasmid.protocols import Actor, Bundle, Cluster, Resources, RolloutEngine, Trainer, call
from plasmid.utils.waiting import together

from ..checkpoint.run_folder import RunFolder
from ..cluster import open_cluster
from ..cluster.layout import Layout
from ..cluster.node_checks import prepare_nodes
from ..cluster.opening import cluster_address
from ..rollout.worker import RolloutWorker
from ..rollout.worker_pool import WorkerPool
from .deadlines import DeadlineEngine, DeadlineTrainer

log = logging.getLogger(__name__)
T = TypeVar("T")
MakeCluster = Callable[[RunFolder], Cluster]


@dataclass(slots=True, kw_only=True, eq=False)
class RunHandles:
    """Whatever of trainer, engine and workers a run has."""

    cluster: Cluster
    trainer: Trainer | None = None
    engine: RolloutEngine | None = None
    workers: WorkerPool | None = None
    eval_engine: RolloutEngine | None = None
    """An engine for evaluation sets alone (`placement.eval_ranks`)."""
    eval_workers: WorkerPool | None = None
    """Who asks it."""

    async def close(self) -> None:
        """Stop everything, the cluster last."""
        for part in (self.workers, self.eval_workers, self.engine, self.eval_engine, self.trainer):
            if part is not None:
                try:
                    await part.close()
                except Exception:  # boundary: the others must be stopped too, and why the run ends is said elsewhere
                    log.exception("%s did not close", type(getattr(part, "inner", part)).__name__)
        try:
            await self.cluster.close()
        except Exception:  # boundary: as above
            log.exception("the cluster did not close")


async def start_processes(
    config: RunConfig,
    cluster: Cluster,
    run_dir: Path,
    *,
    with_trainer: bool,
    with_engine: bool,
    evaluating: bool = False,
) -> RunHandles:
    """Start what the run needs, all at once. Stops everything again if a part fails.

    ``evaluating`` is for runs that do nothing else: their engine is free for evaluations, so none gets one of its own.
    """
    handles = RunHandles(cluster=cluster)
    with_eval = with_trainer and with_engine and not evaluating and config.placement.eval_ranks > 0
    try:
        layout = Layout.of(
            config, cluster.num_gpus, with_trainer=with_trainer, with_engine=with_engine, with_eval=with_eval
        )
        site = await _site(config, cluster, run_dir, layout)

        async def start_trainer() -> None:
            trainer = await config.trainer.build(site.context(layout.trainer))
            handles.trainer = DeadlineTrainer(trainer, config.run.train_timeout_s)

        async def start_engine() -> None:
            assert config.rollout is not None
            engine = await config.rollout.build(site.context(layout.engine))
            handles.engine = DeadlineEngine(engine, config.run.sync_timeout_s)

        async def start_eval_engine() -> None:
            assert config.rollout is not None
            engine = await config.rollout.build(site.of_evaluation())
            handles.eval_engine = DeadlineEngine(engine, config.run.sync_timeout_s)

        wanted = [(with_trainer, start_trainer), (with_engine, start_engine), (with_eval, start_eval_engine)]
        await together(start() for needed, start in wanted if needed)
        if handles.engine is not None:
            in_order = config.run.max_staleness == 0
            handles.workers = await _start_workers(
                site, handles.engine, layout.workers, name="rollout-worker", in_order=in_order
            )
        if handles.eval_engine is not None:
            handles.eval_workers = await _start_workers(
                site, handles.eval_engine, layout.workers[:1], name="eval-worker", in_order=False
            )
    except BaseException:
        await handles.close()
        raise
    return handles


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Site:
    """What all parts are built with."""

    cluster: Cluster
    config: RunConfig
    """As processes on every machine of the run can use it."""
    run_dir: Path
    layout: Layout
    threads: int

    def context(self, bundles: tuple[Bundle, ...]) -> BuildContext:
        """Of one part."""
        return BuildContext(
            cluster=self.cluster, config=self.config, run_dir=self.run_dir, bundles=bundles, threads=self.threads
        )

    def of_evaluation(self) -> BuildContext:
        """Of the engine for evaluation sets alone, which sees its own number of ranks where it looks for it."""
        place = self.config.placement.model_copy(update={"engine_ranks": self.config.placement.eval_ranks})
        own = self.config.model_copy(update={"placement": place})
        return replace(self.context(self.layout.evaluation), config=own, engine_name="eval-engine")


async def _site(config: RunConfig, cluster: Cluster, run_dir: Path, layout: Layout) -> _Site:
    """Take the machines, and check them."""
    given = config.placement.threads
    nodes = await cluster.reserve(layout.shares(1 if given == "auto" else given))
    return _Site(
        cluster=cluster,
        config=await prepare_nodes(config, nodes, run_dir),
        run_dir=run_dir,
        layout=layout,
        threads=layout.threads([node.cores for node in nodes]) if given == "auto" else given,
    )


async def _start_workers(
    site: _Site, engine: RolloutEngine, bundles: tuple[Bundle, ...], *, name: str, in_order: bool
) -> WorkerPool:
    config, cluster, run_dir = site.config, site.cluster, site.run_dir
    dump = config.model_dump(mode="json")
    limit = config.placement.start_timeout_s
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}

    async def start(index: int, bundle: Bundle) -> Actor:
        actor = await cluster.start(
            RolloutWorker,
            dump,
            run_dir,
            engine.client,
            cluster.store,
            name=f"{name}-{index}",
            resources=Resources(bundles=(bundle,), env=env),
            timeout_s=limit,
        )
        await call(actor, limit, RolloutWorker.open)
        return actor

    rewards = [config.rewards, *(set_.rewards for set_ in config.eval)]
    actors = await together(start(i, bundle) for i, bundle in enumerate(bundles))
    return WorkerPool(
        actors=tuple(actors),
        rollout_s=config.run.rollout_timeout_s,
        reward_s=max(sum(reward.timeout_s for reward in used) for used in rewards),
        in_order=in_order,
    )


def interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on a loop of its own; one that `Interrupts` has cancelled raises `KeyboardInterrupt`."""
    try:
        return asyncio.run(main)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def on_ray(config: RunConfig) -> MakeCluster:
    """Makes a cluster as the recipe says, whose processes log into the run's folder."""

    def make(folder: RunFolder) -> Cluster:
        place = config.placement
        return open_cluster(log_dir=folder.logs, address=cluster_address(place), wait_s=place.wait_timeout_s)

    return make


async def start_run(
    config: RunConfig,
    folder: RunFolder,
    make_cluster: MakeCluster,
    *,
    with_trainer: bool,
    with_engine: bool,
    is_new: bool,
    evaluating: bool = False,
) -> RunHandles:
    """Start the processes of the run. A new run that could not start has not taken its folder."""
    try:
        cluster = make_cluster(folder)
        return await start_processes(
            config,
            cluster,
            folder.path,
            with_trainer=with_trainer,
            with_engine=with_engine,
            evaluating=evaluating,
        )
    except BaseException:
        if is_new:
            folder.vacate()
        raise
