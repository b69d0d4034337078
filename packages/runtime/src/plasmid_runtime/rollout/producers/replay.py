"""Groups out of the sample store of an earlier run: to debug a trainer without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError
from plasmid.protocols import Store
from plasmid.types.batch import GroupRef
from plasmid.types.shared_groups import share

from ...observe.sample_store import read_dropped, read_samples, read_table
from .producer import Taken


def stored_batches(run_dir: Path) -> list[Path]:
    """Sample files of a run, in order. Raises `CheckpointError` if there are none."""
    files = sorted((run_dir / "samples").glob("batch-*.parquet"))
    if not files:
        raise CheckpointError(
            f"--replay: {run_dir} holds no samples (samples/batch-*.parquet); name the folder of a run that has some"
        )
    return files


def check_replay(config: RunConfig, run_dir: Path) -> None:
    """Raises `CheckpointError` if the run's samples are not there, or lack what the algorithm reads of them."""
    first = stored_batches(run_dir)[0]
    if not config.algorithm.reads_rollout_logprobs():
        return
    for sample in (sample for group in read_samples(first) for sample in group.samples):
        if sample.sampling.is_restricted and sample.kept is None and sample.num_generated:
            name, value = next(iter(sample.sampling.restrictions.items()))
            raise CheckpointError(
                f"--replay: {first}: sample {sample.id} was drawn with {name} = {value}, and what that left to draw "
                "from was not stored; ratios to its log-probabilities, which this algorithm corrects with, would be "
                'wrong; set algorithm.old_policy = "trainer" and algorithm.opsm = "off", or replay another run'
            )


class ReplayProducer:
    """Implements `rollout.producer.Producer`: the batches of one run, in their order, dropped groups left out."""

    def __init__(self, run_dir: Path, store: Store) -> None:
        self._files = stored_batches(run_dir)
        self._store = store
        self._next = 0
        self._uses: Counter[int] = Counter()

    async def take(self, count: int, *, version: int) -> Taken:
        """The groups of the next batch, however many it had; none when all batches have been replayed."""
        if self._next == len(self._files):
            return Taken(groups=(), dropped=())
        file, self._next = self._files[self._next], self._next + 1
        dropped = read_dropped(file)
        groups = [group for group in read_samples(file) if group.id not in dropped]
        shared = [replace(share(group, self._store), uses=self._uses[group.id]) for group in groups]
        self._uses.update(group.id for group in groups)
        return Taken(groups=tuple(shared), dropped=())

    def release(self, count: int, *, version: int) -> None:
        """Nothing waits for slots here."""

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def finished(self) -> tuple[GroupRef, ...]:
        return ()

    def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        self._next = int(state["next"])
        for file in self._files[: self._next]:
            self._uses.update(set(read_table(file, columns=("group_id",)).column("group_id").to_pylist()))

    async def close(self) -> None:
        """Nothing is in flight."""
