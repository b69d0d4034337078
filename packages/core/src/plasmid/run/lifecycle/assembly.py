"""Puts the loop together: producer, saving, and what a resumed run takes up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pluggy

from ...batch import GroupRef
from ...components import PromptStream
from ...config import RunConfig
from ...observe.dispatch import ObserverQueues
from ...observe.journal import read_journal
from ...observe.recorder import MetricsRecorder
from ...observe.system import SystemMonitor
from ...rollout.producers.demonstrations import Demonstrated
from ...rollout.producers.draws import Draw, Draws
from ...rollout.producers.producer import DropLimit, Producer
from ...rollout.producers.replay import Replay
from ...rollout.producers.reuse import Reusing
from ...rollout.producers.stream import Stream
from ...rollout.producers.waves import Waves
from ...rollout.worker import Job
from ...seeds import seed_of
from ...waiting import GRACE, within
from ..checkpoint.folder import Progress
from ..checkpoint.resume import Restored, load_trainer, resume_run
from ..checkpoint.run_folder import RunFolder
from ..checkpoint.saver import Saver
from ..evaluation.evaluator import Bench, Due, EvaluationJournal, Evaluator
from ..evaluation.sets import EvaluationSet
from ..lifecycle.startup import Parts
from ..loop.batch_hooks import BatchHooks
from ..loop.loop import Loop, LoopParts
from .interrupts import Closing


async def build_loop(
    config: RunConfig,
    parts: Parts,
    folder: RunFolder,
    stream: PromptStream,
    queues: ObserverQueues,
    evaluator: Evaluator | None,
    *,
    state: Restored | None,
    replay: Path | None,
    stack: Closing,
    plugins: pluggy.PluginManager,
) -> Loop:
    """The loop, ready to run."""
    producer: Producer
    if replay is not None:
        producer = Replay(replay, parts.cluster.store)
    else:
        producer = make_producer(config, parts, Draws(stream), queues)
        if config.reuse is not None and parts.trainer is not None:
            producer = Reusing(producer, config.reuse, seed=config.run.seed)
    stack.later("rollouts", producer.close)
    monitor = SystemMonitor()
    stack.later("the system monitor", monitor.close)
    recorder = MetricsRecorder(path=folder.metrics, queues=queues, monitor=monitor, data=stream)
    stack.later("the journal", recorder.journal.close)
    progress = Progress()
    if state is not None:
        progress = await resume_run(
            config,
            state,
            trainer=parts.trainer,
            workers=parts.workers,
            store=parts.cluster.store,
            producer=producer,
            folder=folder,
            journal=recorder.journal,
        )
    elif config.checkpoint.start_from != "none" and parts.trainer is not None:
        await load_trainer(config, parts.trainer, Path(config.checkpoint.start_from))
    saver = Saver(
        config=config,
        trainer=parts.trainer,
        workers=parts.workers,
        producer=producer,
        folder=folder,
        queues=queues,
        pending_evaluations=evaluator.pending if evaluator is not None else tuple,
    )
    stack.later("the checkpoint under way", saver.close)

    async def write_samples(groups: tuple[GroupRef, ...], step: int, name: str) -> None:
        if parts.workers is not None:
            await parts.workers.write(folder.samples_of(name, step), groups, step)

    loop_parts = LoopParts(
        trainer=parts.trainer,
        engine=parts.engine,
        producer=producer,
        observers=recorder,
        write_samples=write_samples,
        evaluations=evaluator,
        saver=saver,
        change=BatchHooks(plugins).changed,
    )
    return Loop(config=config, parts=loop_parts, progress=progress)


def make_producer(config: RunConfig, parts: Parts, draws: Draws, queues: ObserverQueues) -> Producer:
    """Demonstrations as they are, waves if training is on-policy, else a stream as large as the staleness admits."""
    workers, engine, run = parts.workers, parts.engine, config.run
    needs = config.algorithm.needs()
    if needs.demonstrations:
        return Demonstrated(draws, parts.cluster.store)
    assert workers is not None and engine is not None

    def job(draw: Draw) -> Job:
        return Job(
            group_id=draw.id,
            name=str(draw.id),
            prompt=draw.prompt,
            num_samples=run.samples_per_prompt,
            sampling=config.sampling_of(draw.prompt),
            seed=seed_of(run.seed, draw.id),
            greedy=needs.greedy_baseline,
            wants_kept_sets=config.rollout is not None and config.rollout.gives_kept_sets(),
        )

    async def roll_out(draw: Draw) -> GroupRef:
        group = await workers.roll_out(job(draw))
        queues.emit("group_scored", group=group)
        return group

    async def expect(wave: Sequence[Draw]) -> None:
        sessions = [session for draw in wave for session in job(draw).sessions()]
        await within(run.sync_timeout_s * GRACE, "engine.expect (run.sync_timeout_s)", engine.expect(sessions))

    limit = DropLimit(limit=run.max_dropped, failed_limit=run.prompts_per_batch)
    if run.max_staleness == 0:
        return Waves(draws, roll_out, expect, limit=limit)
    slots = round((run.max_staleness + 1) * run.sync_every * run.prompts_per_batch * run.over_sampling)
    return Stream(draws, roll_out, slots=slots, max_staleness=run.max_staleness, limit=limit, policy=config.buffer)


def open_evaluator(
    config: RunConfig,
    parts: Parts,
    folder: RunFolder,
    sets: Sequence[EvaluationSet],
    queues: ObserverQueues,
    stack: Closing,
    *,
    state: Restored | None = None,
    training: bool = True,
) -> Evaluator | None:
    """What evaluates the sets and writes their journal; None where nothing can be sampled."""
    if parts.workers is None or parts.engine is None:
        return None
    telling = EvaluationJournal(folder, queues)
    stack.later("the journal of evaluations", telling.journal.close)
    own = None
    if parts.eval_workers is not None and parts.eval_engine is not None:
        own = Bench(workers=parts.eval_workers, engine=parts.eval_engine)
    evaluator = Evaluator(
        config,
        sets,
        shared=Bench(workers=parts.workers, engine=parts.engine),
        own=own,
        samples_dir=folder.samples,
        telling=telling,
        known=_known(folder, state) if state is not None else {},
        pending=[(str(name), int(batch)) for name, batch in state.state.evaluations] if state is not None else (),
        training=training and parts.trainer is not None,
    )
    stack.later("evaluations", evaluator.close)
    return evaluator


def _known(folder: RunFolder, restored: Restored) -> dict[Due, Mapping[str, float]]:
    """Evaluations that were made up to the checkpoint: a run stopped before its first batch has made those of 0."""
    entries = read_journal(folder.evaluations)
    return {(entry.name, entry.step): entry.metrics for entry in entries if entry.step <= restored.state.batch}
