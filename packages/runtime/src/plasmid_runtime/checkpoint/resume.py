"""Continue a run from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid.protocols import Store, Trainer
from plasmid.types.shared_groups import share

from ..observe.journal import Journal
from ..observe.sample_store import read_dropped, read_samples
from ..rollout.producers.producer import Producer
from ..rollout.worker_pool import WorkerPool
from .folder import CheckpointFolder, Progress, RunState, check_same_config, read_state
from .run_folder import RunFolder
from .saver import BUFFER, TRAINER, WORKER_STATES, stateful_components


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint to continue from."""

    path: Path
    state: RunState


def open_resume_point(folder: RunFolder, config: RunConfig) -> ResumePoint:
    """The newest checkpoint of the folder, as `read_resume_point` does. Remains of others go."""
    CheckpointFolder(folder.checkpoints, config.checkpoint).discard()
    return read_resume_point(folder, config)


def read_resume_point(folder: RunFolder, config: RunConfig) -> ResumePoint:
    """The newest checkpoint of the folder, after checking that the recipe is still the same."""
    path = CheckpointFolder(folder.checkpoints, config.checkpoint).newest()
    state = read_state(path)
    check_same_config(state.config, config)
    return ResumePoint(path=path, state=state)


async def resume_run(
    config: RunConfig,
    checkpoint: ResumePoint,
    *,
    trainer: Trainer | None,
    workers: WorkerPool | None,
    store: Store,
    producer: Producer,
    folder: RunFolder,
    journal: Journal,
) -> Progress:
    """Bring every part of the run to the state of the checkpoint, and remove what was written after it."""
    state = checkpoint.state
    if trainer is not None:
        await trainer.load(checkpoint.path / TRAINER)
    buffered = checkpoint.path / BUFFER
    groups, dropped = (read_samples(buffered), read_dropped(buffered)) if buffered.exists() else ([], {})
    shared = [share(group, store, dropped.get(group.id, "")) for group in groups]
    producer.restore(state.producer, shared)
    if workers is not None and (checkpoint.path / WORKER_STATES).is_dir():
        await workers.restore(checkpoint.path / WORKER_STATES)
    journal.truncate_after(state.batch)
    Journal(folder.evaluations).truncate_after(state.batch)
    _forget_samples(folder, state, buffered=[group.id for group in groups])
    for place, component in stateful_components(config).items():
        if place in state.components:
            component.restore(state.components[place])
    return Progress(batch=state.batch, version=state.version)


def _forget_samples(folder: RunFolder, state: RunState, *, buffered: Sequence[int]) -> None:
    """Remove the sample files of what the continued run does again."""
    again = {*buffered, *(item["id"] for item in state.producer.get("pending", ()))}
    for path in folder.samples.glob("*.parquet"):  # batch-000012, end-000012 and eval-<set>-000012
        late = int(path.stem.rpartition("-")[2]) > state.batch
        if not late and path.stem.startswith("end-"):
            late = any(id_ in again or id_ >= state.producer["next"] for id_ in read_dropped(path))
        if late:
            path.unlink()
