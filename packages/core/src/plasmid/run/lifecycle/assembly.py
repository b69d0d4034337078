"""Puts the loop together: producer, saving, and what a resumed run takes up again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy

from ...batch import GroupRef
from ...components import PromptStream
from ...config import RunConfig
from ...observe.dispatch import ObserverQueues
from ...observe.journal import Journal
from ...observe.sample_store import read_dropped, read_samples
from ...observe.system import SystemMonitor
from ...protocols import Trainer
from ...rollout.producers.demonstrations import Demonstrated
from ...rollout.producers.draws import Draw, Draws
from ...rollout.producers.producer import DropLimit, Producer
from ...rollout.producers.replay import Replay
from ...rollout.producers.reuse import Reusing
from ...rollout.producers.stream import Stream
from ...rollout.producers.waves import Waves
from ...rollout.worker import Job, share
from ...seeds import seed_of
from ...waiting import GRACE, within
from ..checkpoint.folder import CheckpointFolder, RunState, check_same_config, read_state
from ..checkpoint.run_folder import RunFolder
from ..checkpoint.saver import BUFFER, MEMORY, Saver, stateful
from ..evaluation.evaluator import Evaluator
from ..loop.batch_hooks import BatchHooks
from ..loop.loop import Loop, LoopParts, Progress
from .exit_stack import Closing
from .startup import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint to continue from."""

    path: Path
    state: RunState


def restore(folder: RunFolder, config: RunConfig) -> Restored:
    """The newest checkpoint of the folder, as `read_newest` does. Remains of others go."""
    CheckpointFolder(folder.checkpoints, config.checkpoint).discard()
    return read_newest(folder, config)


def read_newest(folder: RunFolder, config: RunConfig) -> Restored:
    """The newest checkpoint of the folder, after checking that the recipe is still the same."""
    path = CheckpointFolder(folder.checkpoints, config.checkpoint).newest()
    state = read_state(path)
    check_same_config(state.config, config.model_dump(mode="json"))
    return Restored(path=path, state=state)


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
    recorder = Recorder(folder=folder, queues=queues, monitor=monitor, data=stream)
    stack.later("the journal", recorder.journal.close)
    progress = Progress()
    if state is not None:
        progress = await _take_up(config, state, parts, producer, folder, recorder)
        for place, tracker in stateful(config).items():
            if place in state.state.components:
                tracker.restore(state.state.components[place])
    elif config.checkpoint.start_from != "none" and parts.trainer is not None:
        await _load(config, parts.trainer, Path(config.checkpoint.start_from))
    saver = Saver(config=config, parts=parts, producer=producer, folder=folder, queues=queues, evaluator=evaluator)
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


class Recorder:
    """Writes metrics to the run's journal before any observer hears of them, and adds gauges of data and machine."""

    def __init__(
        self, *, folder: RunFolder, queues: ObserverQueues, monitor: SystemMonitor, data: PromptStream
    ) -> None:
        self.journal = Journal(folder.metrics)
        self._queues, self._monitor, self._data = queues, monitor, data

    def emit(self, hook: str, **kwargs: Any) -> None:
        """Implements `loop.Telling`."""
        if hook == "step_finished":
            kwargs["metrics"] = {**kwargs["metrics"], **self._data.metrics(), **self._monitor.metrics()}
            self.journal.append(kwargs["step"], metrics=kwargs["metrics"])
        self._queues.emit(hook, **kwargs)


def _forget_samples(folder: RunFolder, state: RunState, *, buffered: Sequence[int]) -> None:
    """Remove the sample files of what the continued run does again."""
    again = {*buffered, *(item["id"] for item in state.producer.get("pending", ()))}
    for path in folder.samples.glob("*.parquet"):  # batch-000012, end-000012 and eval-<set>-000012
        late = int(path.stem.rpartition("-")[2]) > state.batch
        if not late and path.stem.startswith("end-"):
            late = any(id_ in again or id_ >= state.producer["next"] for id_ in read_dropped(path))
        if late:
            path.unlink()


async def _load(config: RunConfig, trainer: Trainer, checkpoint: Path) -> None:
    limit_s = config.run.train_timeout_s * GRACE
    await within(limit_s, "trainer.load (run.train_timeout_s)", trainer.load(checkpoint / "trainer"))


async def _take_up(
    config: RunConfig, restored: Restored, parts: Parts, producer: Producer, folder: RunFolder, recorder: Recorder
) -> Progress:
    state = restored.state
    if parts.trainer is not None:
        await _load(config, parts.trainer, restored.path)
    buffered = restored.path / BUFFER
    groups, dropped = (read_samples(buffered), read_dropped(buffered)) if buffered.exists() else ([], {})
    shared = [share(group, parts.cluster.store, dropped.get(group.id, "")) for group in groups]
    producer.restore(state.producer, shared)
    if parts.workers is not None and (restored.path / MEMORY).is_dir():
        await parts.workers.restore(restored.path / MEMORY)
    recorder.journal.truncate_after(state.batch)
    Journal(folder.evaluations).truncate_after(state.batch)
    _forget_samples(folder, state, buffered=[group.id for group in groups])
    return Progress(batch=state.batch, version=state.version)
