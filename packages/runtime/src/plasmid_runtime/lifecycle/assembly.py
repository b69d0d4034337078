"""Assemble the training loop: producer, checkpoint saver, and restored state."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pluggy
from plasmid.config.run import RunConfig
from plasmid.types.batch import GroupRef
from plasmid.utils.seeds import seed_of
from plasmid_models.routing import read_routing

from ..checkpoint.folder import Progress
from ..checkpoint.resume import ResumePoint, resume_run
from ..checkpoint.run_folder import RunFolder
from ..checkpoint.saver import TRAINER, CheckpointSaver
from ..evaluation.evaluator import Due, EvaluationJournal, Evaluator, Sampler
from ..evaluation.sets import EvaluationSet
from ..loop.batch_hooks import BatchHooks
from ..loop.loop import Loop
from ..loop.policy_sync import PolicySync
from ..observe.dispatch import ObserverQueues
from ..observe.journal import read_journal
from ..observe.recorder import MetricsRecorder
from ..observe.system import SystemMonitor
from ..planning.utilization import TrainUtilization
from ..rollout.producers.demonstrations import DemonstrationProducer
from ..rollout.producers.draws import Draw, Draws
from ..rollout.producers.producer import DropLimit, Producer
from ..rollout.producers.replay import ReplayProducer
from ..rollout.producers.reuse import ReuseProducer
from ..rollout.producers.stream import StreamProducer
from ..rollout.producers.waves import WaveProducer
from ..rollout.worker import Job
from ..rollout.worker_pool import WorkerPool
from .export import export_policy
from .shutdown import LoggingExitStack
from .startup import RunHandles

log = logging.getLogger(__name__)


async def build_loop(
    config: RunConfig,
    handles: RunHandles,
    folder: RunFolder,
    draws: Draws,
    queues: ObserverQueues,
    evaluator: Evaluator | None,
    *,
    state: ResumePoint | None,
    replay: Path | None,
    stack: LoggingExitStack,
    plugins: pluggy.PluginManager,
) -> Loop:
    """Build a loop that is ready to run."""
    producer = _open_producer(config, handles, draws, queues, replay)
    stack.add_close("rollouts", producer.close)
    monitor = SystemMonitor()
    stack.add_close("the system monitor", monitor.close)
    recorder = MetricsRecorder(path=folder.metrics, queues=queues, monitor=monitor, data_metrics=draws.metrics)
    stack.add_close("the journal", recorder.journal.close)
    progress = Progress()
    if state is not None:
        progress = await resume_run(
            config,
            state,
            trainer=handles.trainer,
            workers=handles.workers,
            store=handles.cluster.store,
            producer=producer,
            folder=folder,
            journal=recorder.journal,
        )
    elif config.checkpoint.start_from != "none" and handles.trainer is not None:
        await handles.trainer.load(Path(config.checkpoint.start_from) / TRAINER)
    saver = CheckpointSaver(
        config=config,
        trainer=handles.trainer,
        workers=handles.workers,
        producer=producer,
        folder=folder,
        queues=queues,
        pending_evaluations=evaluator.list_pending if evaluator is not None else tuple,
    )
    stack.add_close("the checkpoint in progress", saver.close)

    return Loop(
        config=config,
        trainer=handles.trainer,
        engine=handles.engine,
        producer=producer,
        sync=_policy_sync(config, handles, producer, progress, recorder),
        evaluator=evaluator,
        saver=saver,
        recorder=recorder,
        write_samples=partial(_write_samples, handles.workers, folder),
        apply_hooks=BatchHooks(plugins).apply,
        export=partial(_export, config, handles, folder),
        progress=progress,
        utilization=None if handles.trainer is None else TrainUtilization.of(config),
    )


def _open_producer(
    config: RunConfig, handles: RunHandles, draws: Draws, queues: ObserverQueues, replay: Path | None
) -> Producer:
    if replay is not None:
        return ReplayProducer(replay, handles.cluster.store, draws.calls)
    producer = make_producer(config, handles, draws, queues)
    if config.reuse is not None and handles.trainer is not None:
        return ReuseProducer(producer, config.reuse, seed=config.run.seed)
    return producer


def _policy_sync(
    config: RunConfig, handles: RunHandles, producer: Producer, progress: Progress, recorder: MetricsRecorder
) -> PolicySync | None:
    if handles.trainer is None or handles.engine is None:
        return None
    return PolicySync(
        config=config,
        trainer=handles.trainer,
        engine=handles.engine,
        producer=producer,
        progress=progress,
        begin_phase=recorder.begin_phase,
    )


async def _export(config: RunConfig, handles: RunHandles, folder: RunFolder, batch: int) -> None:
    if handles.trainer is not None:
        target = folder.export_of(batch)
        await export_policy(config, handles.trainer, target, batch)
        log.info("batch %d: exported %s", batch, target)


async def _write_samples(
    workers: WorkerPool | None, folder: RunFolder, groups: tuple[GroupRef, ...], step: int, name: str
) -> None:
    if workers is not None:
        await workers.write(folder.samples_of(name, step), groups, step)


def make_producer(config: RunConfig, handles: RunHandles, draws: Draws, queues: ObserverQueues) -> Producer:
    """Create the producer: demonstrations, on-policy waves, or a stream with as many slots as the staleness allows."""
    workers, engine, run = handles.workers, handles.engine, config.run
    needs = config.algorithm.needs()
    if needs.demonstrations:
        return DemonstrationProducer(draws, handles.cluster.store)
    assert workers is not None and engine is not None
    routing = read_routing(config.model.path) if config.trainer.replays_routing() else None

    def make_job(draw: Draw) -> Job:
        return Job(
            group_id=draw.id,
            name=str(draw.id),
            prompt=draw.prompt,
            num_samples=run.samples_per_prompt,
            sampling=config.sampling_of(draw.prompt),
            seed=seed_of(run.seed, draw.id),
            greedy=needs.greedy_baseline,
            wants_kept_sets=config.rollout is not None and config.rollout.gives_kept_sets(),
            routing=routing,
        )

    async def roll_out(draw: Draw) -> GroupRef:
        group = await workers.roll_out(make_job(draw))
        queues.emit("group_scored", group=group)
        return group

    async def expect(wave: Sequence[Draw]) -> None:
        sessions = [session for draw in wave for session in make_job(draw).sessions()]
        await engine.expect(sessions)

    async def snapshot_rollouts() -> set[int]:
        return {int(name) for name in await workers.snapshot()}

    limit = DropLimit(limit=run.max_dropped, failed_limit=run.prompts_per_batch)
    if run.max_staleness == 0:
        return WaveProducer(draws, roll_out, expect, limit=limit)
    slots = round((run.max_staleness + 1) * run.sync_every * run.prompts_per_batch * run.over_sampling)
    return StreamProducer(
        draws,
        roll_out,
        slots=slots,
        max_staleness=run.max_staleness,
        sync_every=run.sync_every,
        limit=limit,
        policy=config.buffer,
        snapshot_rollouts=snapshot_rollouts,
    )


def open_evaluator(
    config: RunConfig,
    handles: RunHandles,
    folder: RunFolder,
    sets: Sequence[EvaluationSet],
    queues: ObserverQueues,
    stack: LoggingExitStack,
    *,
    state: ResumePoint | None = None,
    training: bool = True,
) -> Evaluator | None:
    """Create the evaluator and its journal; None for runs that cannot sample."""
    if handles.workers is None or handles.engine is None:
        return None
    journal = EvaluationJournal(folder, queues)
    stack.add_close("the journal of evaluations", journal.journal.close)
    own = None
    if handles.eval_workers is not None and handles.eval_engine is not None:
        own = Sampler(workers=handles.eval_workers, engine=handles.eval_engine)
    evaluator = Evaluator(
        config,
        sets,
        shared=Sampler(workers=handles.workers, engine=handles.engine),
        own=own,
        samples_dir=folder.samples,
        journal=journal,
        known=_read_known_results(folder, state) if state is not None else {},
        pending=[(str(name), int(batch)) for name, batch in state.state.evaluations] if state is not None else (),
        training=training and handles.trainer is not None,
    )
    stack.add_close("evaluations", evaluator.close)
    return evaluator


def _read_known_results(folder: RunFolder, state: ResumePoint) -> dict[Due, Mapping[str, float]]:
    """Return the evaluation results up to the checkpoint's batch; batch 0 is the evaluation before training."""
    entries = read_journal(folder.evaluations)
    return {(entry.name, entry.step): entry.metrics for entry in entries if entry.step <= state.state.batch}
