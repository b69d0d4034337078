"""Saving in the background: all ranks plan together, then each writes its own files from a copy in host memory."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import CheckpointError
from plasmid_training.rank.state import failure_cause
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import _DistWrapper


class _HostCopies(DefaultSavePlanner):
    """Copies of the data in this rank's part of a plan, which later training steps do not change."""

    def __init__(self, planner: DefaultSavePlanner, plan: SavePlan) -> None:
        super().__init__()
        self._copies = {item.index: _copy(planner.resolve_data(item)) for item in plan.items}
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._copies[write_item.index]


class PendingSave:
    """One rank's part of a checkpoint that is being written. Implements `plasmid_training.rank.backend.PendingSave`."""

    def __init__(self, path: Path, state: Mapping[str, Any], *, write_first: Callable[[], None]) -> None:
        """Plan with all ranks, copy this rank's tensors and start writing. Raises `CheckpointError`.

        ``write_first`` writes further files once the folder exists; if it fails on a rank, no rank starts writing.
        """
        self._path, self._writer, self._metadata = path, FileSystemWriter(path), Metadata({})
        planner = DefaultSavePlanner()
        ranks = _DistWrapper(None, True, 0)

        def plan_rank() -> SavePlan:
            planner.set_up_planner(dict(state), self._writer.storage_meta(), ranks.is_coordinator)
            self._writer.set_up_storage_writer(ranks.is_coordinator)
            plan = self._writer.prepare_local_plan(planner.create_local_plan())
            write_first()
            return plan

        def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(plans)

        with raise_write_errors(path):
            plan = planner.finish_plan(ranks.reduce_scatter("plan", plan_rank, plan_all))
        copies = _HostCopies(planner, plan)
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._files = pool.submit(lambda: self._writer.write_data(plan, copies).wait())
        pool.shutdown(wait=False)

    async def finish_shards(self) -> bytes:
        """Wait for this rank's files; return their index for `commit`. Raises `CheckpointError`."""
        with raise_write_errors(self._path):
            return pickle.dumps(await asyncio.wrap_future(self._files))

    def commit(self, written: Sequence[bytes]) -> None:
        """Finish the checkpoint from all ranks' files; called on the first rank. Raises `CheckpointError`."""
        with raise_write_errors(self._path):
            self._writer.finish(self._metadata, [pickle.loads(results) for results in written])


@contextmanager
def raise_write_errors(path: Path) -> Iterator[None]:
    """Convert errors of writing a checkpoint to `CheckpointError`."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot write the trainer state: {failure_cause(error)}") from None


def _copy(data: Tensor | io.BytesIO) -> Tensor | io.BytesIO:
    """Copy a tensor to host memory, pinned if it is on a GPU so that copies overlap."""
    if not isinstance(data, Tensor):
        return data
    return torch.empty_like(data, device="cpu", pin_memory=data.is_cuda).copy_(data, non_blocking=True)
