"""Receiving side of one weight sync: every tensor exactly once, verified before it is written."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future

import torch
from plasmid.errors import SyncError
from plasmid.protocols import Bucket
from plasmid.types import BucketSum, SyncResult
from plasmid_models.sync import checksum, unpack
from torch import Tensor


class WeightUpdate:
    """One policy version being written into the model. After the first error no more buckets are accepted."""

    def __init__(
        self, token: str, version: int, tensors: Mapping[str, Tensor], *, kept: Collection[str] = frozenset()
    ) -> None:
        """Start an update. The tensors in ``kept`` (the base of an adapter, sent earlier) may be omitted, but only
        together."""
        self.token = token
        self.version = version
        self.result: Future[SyncResult] = Future()
        """The result, or `SyncError`."""
        self.senders_done = 0
        """Number of trainer ranks that have sent their share."""
        self._tensors, self._kept = tensors, kept
        self._tied = group_tied_names(tensors)
        self._started = time.monotonic()
        self._sums: list[BucketSum] = []
        self._written: set[str] = set()

    @property
    def is_open(self) -> bool:
        """Return False once the update has succeeded or failed."""
        return not self.result.done()

    @property
    def overwrote_kept(self) -> bool:
        """Return whether the update failed after it overwrote some of the ``kept`` tensors."""
        return self.result.done() and self.result.exception() is not None and not self._written.isdisjoint(self._kept)

    def put(self, bucket: Bucket) -> None:
        """Verify a bucket, then write it into the model. Raises `SyncError`; the model may then be partly updated."""
        if not self.is_open:
            raise SyncError(f"{self._where}: already finished; no more buckets are accepted")
        try:
            self._verify_checksum(bucket)
            tensors = list(unpack(bucket))
            for name, tensor in tensors:
                self._check(name, tensor)
        except SyncError as error:
            self.fail(error)
            raise
        for name, tensor in tensors:
            self._tensors[name].copy_(tensor)
            self._written.add(name)

    def _verify_checksum(self, bucket: Bucket) -> None:
        received = checksum(bucket.data)
        self._sums.append(BucketSum(index=bucket.index, num_bytes=bucket.data.numel(), checksum=received))
        if received != bucket.checksum:
            raise SyncError(
                f"{self._where}: bucket {bucket.index} has checksum {received:016x}, expected {bucket.checksum:016x}"
            )

    def _check(self, name: str, tensor: Tensor) -> None:
        own = self._tensors.get(name)
        if own is None:
            raise SyncError(f"{self._where}: the engine's model has no tensor {name!r}")
        if name in self._written:
            raise SyncError(f"{self._where}: tensor {name!r} was sent twice")
        if (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
            sent, expected = f"{tensor.dtype} {tuple(tensor.shape)}", f"{own.dtype} {tuple(own.shape)}"
            raise SyncError(f"{self._where}: tensor {name!r} has {sent}, expected {expected}")
        twin = next((other for other in self._tied.get(name, ()) if other in self._written), None)
        if twin is not None and not torch.equal(own.cpu(), tensor.cpu()):
            raise SyncError(
                f"{self._where}: tensors {twin!r} and {name!r} are tied, but were sent with different values"
            )

    def finish(self) -> SyncResult:
        """Complete the update. Raises `SyncError` if a tensor is missing."""
        if not self.is_open:
            return self.result.result()
        kept = self._kept if self._written.isdisjoint(self._kept) else ()
        required = [name for name in list_distinct_names(self._tensors) if name not in kept]
        missing = [name for name in required if self._written.isdisjoint(self._tied.get(name, {name}))]
        if missing:
            error = SyncError(f"{self._where}: {len(missing)} tensors were not sent, the first is {missing[0]!r}")
            self.fail(error)
            raise error
        result = SyncResult(
            version=self.version,
            num_tensors=len(self._written),
            buckets=tuple(sorted(self._sums, key=lambda bucket: bucket.index)),
            seconds=time.monotonic() - self._started,
        )
        self.result.set_result(result)
        return result

    def fail(self, error: SyncError) -> None:
        """Fail the update. The engine must not serve afterwards, because tensors already written are not restored."""
        if self.is_open:
            self.result.set_exception(error)

    @property
    def _where(self) -> str:
        return f"weight sync of version {self.version}"


def group_tied_names(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Map every tensor that has several names to all of them."""
    return {name: names for names in _by_memory(tensors) if len(names) > 1 for name in names}


def list_distinct_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the first name of every tensor that does not share the memory of an earlier one."""
    return [names[0] for names in _by_memory(tensors)]


def _by_memory(tensors: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tensor.data_ptr(), []).append(name)
    return [tuple(names) for names in found.values()]
