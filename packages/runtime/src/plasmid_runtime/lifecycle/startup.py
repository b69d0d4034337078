"""Start and stop trainer, engine and workers of a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from plasmid.components import BuildContext
from plasmid.config.run import RunConfig
from plasmid.protocols import Bundle, Cluster, Resources, RolloutEngine, TeacherClient, Trainer
from plasmid.utils.waiting import run_together

from ..checkpoint.run_folder import RunFolder
from ..cluster import open_cluster
from ..cluster.layout import Layout
from ..cluster.node_checks import prepare_nodes
from ..cluster.opening import EarlyRay, cluster_address
from ..loop.call_limits import CallLimits, limit_engine, limit_trainer
from ..observe.start_watch import StartWatch, ignore_events
from ..planning.offload import resolve_offload
from ..rollout.worker import RolloutWorker
from ..rollout.worker_pool import WorkerPool
from .shutdown import raise_cluster_failures

log = logging.getLogger(__name__)
T = TypeVar("T")
MakeCluster = Callable[[RunFolder], Cluster]


@dataclass(slots=True, kw_only=True, eq=False)
class RunHandles:
    """Handles of a run's cluster, trainer, engines and workers; None for parts that it does not have."""

    cluster: Cluster
    trainer: Trainer | None = None
    engine: RolloutEngine | None = None
    workers: WorkerPool | None = None
    eval_engine: RolloutEngine | None = None
    """Separate engine for evaluation sets (`placement.eval_ranks`)."""
    eval_workers: WorkerPool | None = None
    """Workers of the evaluation engine."""
    teacher: TeacherClient | None = None
    """Client of a teacher outside of the trainer."""

    async def close(self) -> None:
        """Stop everything, the cluster last."""
        for part in (self.workers, self.eval_workers, self.engine, self.eval_engine, self.trainer):
            if part is not None:
                try:
                    await part.close()
                except Exception:  # boundary: stop the others as well; the run's own error is reported elsewhere
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
    """Start all processes of the run concurrently. If one fails, stops all of them.

    ``evaluating`` is for runs that only evaluate and therefore need no separate evaluation engine.
    """
    config, _ = resolve_offload(config)  # for runs without a trainer; `prepare_run` does it for others
    handles = RunHandles(cluster=cluster)
    with_teacher = with_engine and not evaluating
    with_eval = with_trainer and with_engine and not evaluating and config.placement.eval_ranks > 0
    try:
        layout = Layout.of(
            config, cluster.num_gpus, with_trainer=with_trainer, with_engine=with_engine, with_eval=with_eval
        )
        options, limits = await _prepare_options(config, cluster, run_dir, layout), CallLimits(config.run)
        trainer_loaded = asyncio.Event()

        async def start_trainer() -> None:
            context = replace(options.context(layout.trainer), role_bundles=layout.roles)
            handles.trainer = limit_trainer(await config.trainer.build(context), config.run, limits)
            trainer_loaded.set()

        async def start_engine() -> None:
            assert config.rollout is not None
            before_loading = trainer_loaded.wait if layout.has_shared_gpus else None
            context = replace(options.context(layout.engine), before_loading=before_loading)
            handles.engine = limit_engine(await config.rollout.build(context), config.run, limits)

        async def start_eval_engine() -> None:
            assert config.rollout is not None
            handles.eval_engine = limit_engine(await config.rollout.build(options.of_evaluation()), config.run, limits)

        async def connect_teacher() -> None:
            if config.teacher is not None and config.algorithm.needs().teacher:
                handles.teacher = await config.teacher.connect(config)

        async def start_workers() -> None:
            in_order = config.run.max_staleness == 0
            handles.workers = await _start_workers(options, layout.workers, name="rollout-worker", in_order=in_order)

        async def start_eval_workers() -> None:
            handles.eval_workers = await _start_workers(options, layout.workers[:1], name="eval-worker", in_order=False)

        wanted = [(with_trainer, start_trainer), (with_engine, start_engine), (with_eval, start_eval_engine)]
        wanted += [(with_engine, start_workers), (with_eval, start_eval_workers), (with_teacher, connect_teacher)]
        await run_together(start() for needed, start in wanted if needed)
        for workers, engine in ((handles.workers, handles.engine), (handles.eval_workers, handles.eval_engine)):
            if workers is not None and engine is not None:
                await workers.open(engine.client, handles.teacher, limit_s=config.placement.start_timeout_s)
    except BaseException:
        await handles.close()
        raise
    return handles


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BuildOptions:
    """Shared options for building trainer, engines and workers."""

    cluster: Cluster
    config: RunConfig
    """Configuration that is valid on every machine of the run."""
    run_dir: Path
    layout: Layout
    threads: int

    def context(self, bundles: tuple[Bundle, ...]) -> BuildContext:
        """Create the context for building a trainer or an engine on these bundles."""
        return BuildContext(
            cluster=self.cluster, config=self.config, run_dir=self.run_dir, bundles=bundles, threads=self.threads
        )

    def of_evaluation(self) -> BuildContext:
        """Create the context of the evaluation engine, with its own number of ranks as `engine_ranks`."""
        place = self.config.placement.model_copy(update={"engine_ranks": self.config.placement.eval_ranks})
        own = self.config.model_copy(update={"placement": place})
        return replace(self.context(self.layout.evaluation), config=own, engine_name="eval-engine")


async def _prepare_options(config: RunConfig, cluster: Cluster, run_dir: Path, layout: Layout) -> _BuildOptions:
    """Reserve and check the machines."""
    # PyTorch splits elementwise work among threads and processes the end of each part with different code, so results
    # depend on the number of threads
    given = 1 if config.run.deterministic else config.placement.threads
    nodes = await cluster.reserve(layout.shares(1 if given == "auto" else given))
    return _BuildOptions(
        cluster=cluster,
        config=await prepare_nodes(config, nodes, run_dir),
        run_dir=run_dir,
        layout=layout,
        threads=layout.threads([node.cores for node in nodes]) if given == "auto" else given,
    )


async def _start_workers(
    options: _BuildOptions, bundles: tuple[Bundle, ...], *, name: str, in_order: bool
) -> WorkerPool:
    """Start worker processes, which import modules and open what they can while trainer and engine start.

    `WorkerPool.open` connects them.
    """
    config = options.config
    dump = config.model_dump(mode="json")
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    starts = [
        options.cluster.start(
            RolloutWorker,
            dump,
            options.run_dir,
            options.cluster.store,
            name=f"{name}-{index}",
            resources=Resources(bundles=(bundle,), env=env),
            timeout_s=config.placement.start_timeout_s,
        )
        for index, bundle in enumerate(bundles)
    ]
    teacher = config.teacher if config.algorithm.needs().teacher else None
    asks_teacher = teacher is not None and teacher.model_path() is None
    pool = WorkerPool(
        actors=tuple(await run_together(starts)),
        rollout_s=config.run.rollout_timeout_s * (2 if asks_teacher else 1),
        write_s=config.run.write_timeout_s,
        in_order=in_order,
    )
    await pool.open_early(limit_s=config.placement.start_timeout_s)
    return pool


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop. Raises `KeyboardInterrupt` if `Interrupts` cancelled it."""
    try:
        return asyncio.run(main)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def make_ray_factory(config: RunConfig, early: EarlyRay | None = None) -> MakeCluster:
    """Return a factory of the recipe's cluster, whose processes log into the run folder.

    The cluster takes over a Ray that ``early`` has started.
    """

    def make(folder: RunFolder) -> Cluster:
        place, started = config.placement, None if early is None else early.take()
        address = cluster_address(place)
        return open_cluster(log_dir=folder.logs, address=address, wait_s=place.wait_timeout_s, started=started)

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
    emit: Callable[..., None] = ignore_events,
) -> RunHandles:
    """Start the processes of the run. If a new run fails to start, its folder can be used again.

    ``emit`` tells observers what the start is waiting for.
    """
    watch = StartWatch(emit)
    try:
        with watch.watch_cluster_start():
            cluster = make_cluster(folder)
        async with watch.poll(), raise_cluster_failures(cluster):
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
            folder.move_aside()
        raise
