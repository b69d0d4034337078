"""Saving in Megatron's distributed format: all ranks plan together, then each writes its own files.

Megatron writes in forked processes and synchronizes the ranks at the end. Here each rank uses threads, and the driver
passes their results to the first rank: so nothing outlives a killed rank, and no rank has to interrupt training.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
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
from plasmid_training.rank.state import failure_cause
from torch.distributed.checkpoint.api import CheckpointException

from ..upstream.compat import keep_results_in_this_process

ERRORS = (CheckpointingException, CheckpointException, OSError, RuntimeError, KeyError, ValueError, AssertionError)
"""Errors of Megatron for files that it cannot write or read, and for those of another model."""
FORMAT = ("torch_dist", 1)
Results = list[Any]
"""Write results for torch's metadata: file and offset of each item."""


class _PlanStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's save strategy, without writing: it only plans."""

    writer: FileSystemWriterAsync
    metadata: Any = None
    """Metadata of the whole checkpoint; set on the first rank only."""

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, planned: Sequence[Any]) -> AsyncRequest:
        self.writer, self.metadata = writer, planned[1]
        return AsyncRequest(None, (), [])


class PendingSave:
    """One rank's part of a checkpoint that is being written."""

    def __init__(self, path: Path, state: dict[str, Any], *, copy: bool) -> None:
        """Plan with all ranks and start writing. Empties ``state``; with ``copy`` its tensors may change afterwards."""
        keep_results_in_this_process()
        self._path, self._plan = path, _PlanStrategy(*FORMAT)
        dist_checkpointing.save(state, str(path), sharded_strategy=self._plan, async_sharded_save=True)
        state.clear()  # so that temporary tensors are freed as they are copied
        buckets = self._plan.writer.write_buckets or []
        for _, _, (_, tensors) in buckets:
            _to_host(tensors, copy=copy)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        pool = ThreadPoolExecutor(max(1, len(buckets)), thread_name_prefix="checkpoint")
        self._files = [pool.submit(_write_file, self._plan.writer, bucket) for bucket in buckets]
        pool.shutdown(wait=False)
        buckets.clear()  # now only the threads hold the copies

    async def finish_shards(self) -> bytes:
        """Wait for this rank's files; return their index for `commit`. Raises `CheckpointError`."""
        with raise_checkpoint_errors(self._path):
            files = await asyncio.gather(*map(asyncio.wrap_future, self._files))
        return pickle.dumps([result for file in files for result in file])

    def commit(self, written: Sequence[bytes]) -> None:
        """Finish the checkpoint from all ranks' files; called on the first rank. Raises `CheckpointError`."""
        with raise_checkpoint_errors(self._path):
            self._plan.writer.finish(self._plan.metadata, [pickle.loads(results) for results in written])
            save_config(CheckpointingConfig(*FORMAT), str(self._path))


@contextmanager
def raise_checkpoint_errors(path: Path) -> Iterator[None]:
    """Convert errors within the context to `CheckpointError`."""
    try:
        yield
    except ERRORS as error:
        raise CheckpointError(f"{path}: cannot write the trainer state: {failure_cause(error)}") from None


def _to_host(tensors: list[tuple[Any, torch.Tensor]], *, copy: bool) -> None:
    """Replace tensors by copies in host memory, in place, so that each original can be freed before the next copy."""
    for index, (item, tensor) in enumerate(tensors):
        if tensor.is_cuda:
            tensors[index] = (item, tensor.to("cpu", non_blocking=True))
        elif copy:
            tensors[index] = (item, tensor.clone())


def _write_file(writer: FileSystemWriterAsync, bucket: Any) -> Results:
    """Write and flush one file, like one of Megatron's processes."""
    results: SimpleQueue[tuple[int, Results | Exception]] = SimpleQueue()
    count: Queue[int] = Queue()
    count.put(0)
    # unwrap the decorator that disables garbage collection, which only forked processes need
    write = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)
    write([writer.transforms], 0, bucket, results, count, True)
    _, written = results.get()
    if isinstance(written, Exception):
        raise written
    return written
