"""Writing a checkpoint in Megatron's distributed format, which all ranks plan together and each then writes alone.

Megatron would write in processes that it forks, and meet once more at the end. Here each rank has threads, and its
results go to the first rank by way of the driver: so nothing outlives a rank that is killed, and no rank has to leave
its training for it.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from plasmid.errors import CheckpointError
from torch.distributed.checkpoint.api import CheckpointException

from ..upstream.compat import keep_results_in_this_process

ERRORS = (CheckpointingException, CheckpointException, OSError, RuntimeError, KeyError, ValueError, AssertionError)
"""What Megatron raises for files that it cannot write or read, and for those of another model."""
FORMAT = ("torch_dist", 1)
Results = list[Any]
"""What torch's metadata need to know of each thing that was written: in which file, and where."""


class _Planned(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's own way of planning, which stops short of writing."""

    writer: FileSystemWriterAsync
    metadata: Any = None
    """Of the whole checkpoint; the first rank's alone."""

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, planned: Sequence[Any]) -> AsyncRequest:
        self.writer, self.metadata = writer, planned[1]
        return AsyncRequest(None, (), [])


class Writing:
    """One rank's part of one checkpoint, on its way to the disk."""

    def __init__(self, path: Path, state: dict[str, Any], *, copy: bool) -> None:
        """Plan with all ranks and begin to write. Empties the state; with ``copy`` its tensors may then change."""
        keep_results_in_this_process()
        self._path, self._plan = path, _Planned(*FORMAT)
        dist_checkpointing.save(state, str(path), sharded_strategy=self._plan, async_sharded_save=True)
        state.clear()  # what was made for it alone is freed as it is copied
        buckets = self._plan.writer.write_buckets or []
        for _, _, (_, tensors) in buckets:
            _to_host(tensors, copy=copy)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        pool = ThreadPoolExecutor(max(1, len(buckets)), thread_name_prefix="checkpoint")
        self._files = [pool.submit(_write_file, self._plan.writer, bucket) for bucket in buckets]
        pool.shutdown(wait=False)
        buckets.clear()  # the copies live as long as their threads need them

    async def written(self) -> bytes:
        """Wait for this rank's files; what they hold, for `conclude`. Raises `CheckpointError`."""
        with explained(self._path):
            files = await asyncio.gather(*map(asyncio.wrap_future, self._files))
        return pickle.dumps([result for file in files for result in file])

    def conclude(self, written: Sequence[bytes]) -> None:
        """Make a checkpoint of all ranks' files; the first rank does it. Raises `CheckpointError`."""
        with explained(self._path):
            self._plan.writer.finish(self._plan.metadata, [pickle.loads(results) for results in written])
            save_config(CheckpointingConfig(*FORMAT), str(self._path))


def cause(error: BaseException) -> str:
    """The innermost reason on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if unsafe := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it names {unsafe[1]}, which is not made out of a file of somebody else"
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise what goes wrong in it as `CheckpointError`."""
    try:
        yield
    except ERRORS as error:
        raise CheckpointError(f"{path}: the trainer's state cannot be written: {cause(error)}") from None


def _to_host(tensors: list[tuple[Any, torch.Tensor]], *, copy: bool) -> None:
    """Replace tensors by what lies in host memory. In place: one copy is freed before the next is made."""
    for index, (item, tensor) in enumerate(tensors):
        if tensor.is_cuda:
            tensors[index] = (item, tensor.to("cpu", non_blocking=True))
        elif copy:
            tensors[index] = (item, tensor.clone())


def _write_file(writer: FileSystemWriterAsync, bucket: Any) -> Results:
    """Write and flush one file, as one of Megatron's processes would."""
    results: SimpleQueue[tuple[int, Results | Exception]] = SimpleQueue()
    count: Queue[int] = Queue()
    count.put(0)
    # without what stops Python's garbage collector, for the sake of forked processes
    write = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)
    write([writer.transforms], 0, bucket, results, count, True)
    _, written = results.get()
    if isinstance(written, Exception):
        raise written
    return written
