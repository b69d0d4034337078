"""Replay groups from the sample store of an earlier run, for debugging a trainer without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError
from plasmid.protocols import Store
from plasmid.types import StopReason
from plasmid.types.batch import GroupRef
from plasmid.types.shared_groups import store_group

from ...data.data_thread import DataCalls, DirectCalls, await_outcome
from ...observe.sample_store import numbered_files, read_dropped, read_samples, read_table
from .producer import ProducedGroups


def find_stored_batches(run_dir: Path) -> list[Path]:
    """Return the sample files of a run, in order. Raises `CheckpointError` if files are missing."""
    files = numbered_files(run_dir / "samples", "batch-")
    if not files:
        raise CheckpointError(
            f"--replay: {run_dir} has no samples (samples/batch-*.parquet); give the folder of a run that has"
        )
    missing = min(set(range(1, max(files) + 1)) - files.keys(), default=None)
    if missing is not None:
        raise CheckpointError(
            f"--replay: {run_dir}/samples: batch-{missing:06d}.parquet is missing, although later batches exist; "
            "restore it, or replay another run"
        )
    return list(files.values())


def check_replay(config: RunConfig, run_dir: Path) -> None:
    """Raise `CheckpointError` if the run has no samples, or if they lack data that the algorithm needs."""
    first = find_stored_batches(run_dir)[0]
    if config.trainer.replays_routing():
        _check_experts(first)
    if config.algorithm.needs().teacher and config.teacher is not None and config.teacher.model_path() is None:
        _check_teacher(first, config.algorithm.needs().teacher_top_k)
    if not config.algorithm.reads_rollout_logprobs():
        return
    for sample in (sample for group in read_samples(first) for sample in group.samples):
        if sample.sampling.is_restricted and sample.kept is None and sample.num_generated:
            name, value = next(iter(sample.sampling.restrictions.items()))
            raise CheckpointError(
                f"--replay: {first}: sample {sample.id} was sampled with {name} = {value}, but the remaining tokens "
                "were not stored, so the algorithm's ratios to its log-probabilities would be wrong; "
                'set algorithm.old_policy = "trainer" and algorithm.opsm = "off", or replay another run'
            )


def _check_experts(path: Path) -> None:
    for sample in (sample for group in read_samples(path) for sample in group.samples):
        if sample.experts is None and sample.num_generated:
            raise CheckpointError(
                f"--replay: {path}: sample {sample.id} has no experts, which trainer.routing_replay needs; set it to "
                "false, or replay another run"
            )


def _check_teacher(path: Path, top_k: int) -> None:
    name = "teacher_top" if top_k else "teacher_logprobs"
    for sample in (sample for group in read_samples(path) for sample in group.samples):
        is_trained = not sample.is_baseline and sample.stop_reason is not StopReason.ERROR
        if is_trained and sample.loss_mask.any() and getattr(sample, name) is None:
            raise CheckpointError(
                f"--replay: {path}: sample {sample.id} has no {name}, and a replay does not query a teacher "
                "server; set teacher.path, or replay a run with this teacher"
            )
        if top_k and sample.teacher_top is not None and sample.teacher_top.count != top_k:
            raise CheckpointError(
                f"--replay: {path}: sample {sample.id} has {sample.teacher_top.count} top tokens of the teacher at "
                f"each position, but algorithm.top_k needs {top_k}; set it to {sample.teacher_top.count}"
            )


class ReplayProducer:
    """Implements `producer.Producer`: yields the batches of a run in order, without dropped groups."""

    def __init__(self, run_dir: Path, store: Store, calls: DataCalls | None = None) -> None:
        self._files = find_stored_batches(run_dir)
        self._store, self._calls = store, calls or DirectCalls()
        self._next = 0
        self._uses: Counter[int] = Counter()

    async def take(self, count: int, *, version: int) -> ProducedGroups:
        """Return all groups of the next batch, regardless of ``count``; none after the last batch."""
        if self._next == len(self._files):
            return ProducedGroups(groups=(), dropped=())
        file, self._next = self._files[self._next], self._next + 1
        dropped, read = await await_outcome(self._calls.submit(lambda: (read_dropped(file), read_samples(file))))
        groups = [group for group in read if group.id not in dropped]
        shared = [replace(store_group(group, self._store), uses=self._uses[group.id]) for group in groups]
        self._uses.update(group.id for group in groups)
        return ProducedGroups(groups=tuple(shared), dropped=())

    def put_back(self, taken: ProducedGroups) -> None:
        self._next -= 1

    def release(self, count: int, *, version: int) -> None:
        """Do nothing: replay has no slots."""

    async def snapshot(self) -> tuple[dict[str, Any], tuple[GroupRef, ...]]:
        return {"next": self._next}, ()

    async def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        self._next = int(state["next"])
        self._uses.update(await await_outcome(self._calls.submit(self._past_uses)))

    def _past_uses(self) -> Counter[int]:
        uses: Counter[int] = Counter()
        for file in self._files[: self._next]:
            uses.update(set(read_table(file, columns=("group_id",)).column("group_id").to_pylist()))
        return uses

    def depths(self) -> Mapping[str, int]:
        return {}

    async def close(self) -> None:
        """Do nothing: nothing is in flight."""
