"""Continue a run from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError
from plasmid.protocols import Store, Trainer
from plasmid.types.shared_groups import store_group

from ..observe.journal import Journal
from ..observe.sample_store import read_dropped, read_samples
from ..rollout.component_states import restore_component
from ..rollout.in_flight import read_turns
from ..rollout.producers.producer import Producer
from ..rollout.worker_pool import WorkerPool
from .folder import CheckpointFolder, Progress, RunState, check_has_optimizer, check_same_config, read_state
from .run_files import restore_run_files
from .run_folder import RunFolder
from .saver import BUFFER, IN_FLIGHT, TRAINER, WORKER_STATES, list_stateful_components


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint to continue from."""

    path: Path
    state: RunState


def open_resume_point(folder: RunFolder, config: RunConfig) -> ResumePoint:
    """Read the newest intact checkpoint, as by `read_resume_point`, and restore the run's other files to match it."""
    checkpoints = CheckpointFolder(folder.checkpoints, config.checkpoint)
    checkpoints.discard()
    found = read_resume_point(folder, config)
    checkpoints.set_aside(after=found.path)
    restore_run_files(found.path, found.state.batch, folder)
    return found


def read_resume_point(folder: RunFolder, config: RunConfig) -> ResumePoint:
    """Read the newest intact checkpoint of the folder, and check that the recipe has not changed."""
    path = CheckpointFolder(folder.checkpoints, config.checkpoint).find_newest()
    state = read_state(path)
    check_same_config(state.config, config)
    if state.batch < config.run.batches:
        check_has_optimizer(path, state)
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
    """Restore all parts of the run from the checkpoint, and remove files written after it."""
    state = checkpoint.state
    if trainer is not None:
        await trainer.load(checkpoint.path / TRAINER)
    buffered = checkpoint.path / BUFFER
    groups, dropped = (read_samples(buffered), read_dropped(buffered)) if buffered.exists() else ([], {})
    shared = [store_group(group, store, dropped.get(group.id, "")) for group in groups]
    await producer.restore(state.producer, shared)
    if workers is not None:
        workers.resumed.update(
            (name, store.put(turns)) for name, turns in read_turns(checkpoint.path / IN_FLIGHT).items()
        )
    if workers is not None and (checkpoint.path / WORKER_STATES).is_dir():
        await workers.restore(checkpoint.path / WORKER_STATES)
    journal.truncate_after(state.batch)
    Journal(folder.evaluations).truncate_after(state.batch)
    _forget_samples(folder, state, buffered=[group.id for group in groups])
    for place, component in list_stateful_components(config).items():
        if place in state.components:
            restore_component(place, component, [state.components[place]])
    return Progress(batch=state.batch, version=state.version)


def _forget_samples(folder: RunFolder, state: RunState, *, buffered: Sequence[int]) -> None:
    """Remove sample files that the resumed run will write again."""
    again = {*buffered, *(item["id"] for item in state.producer.get("pending", ()))}
    for path in folder.samples.glob("*-*.parquet"):  # batch-000012, end-000012 and eval-<set>-000012
        number = path.stem.rpartition("-")[2]
        if not (number.isdecimal() and path.name.startswith(("batch-", "end-", "eval-"))):
            continue  # not a sample file of this run
        late = int(number) > state.batch
        if not late and path.stem.startswith("end-"):
            try:
                late = any(id_ in again or id_ >= state.producer["next"] for id_ in read_dropped(path))
            except CheckpointError:
                continue  # damaged: already reported by `restore_run_files`
        if late:
            path.unlink()
