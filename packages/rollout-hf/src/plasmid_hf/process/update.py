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
        self,
        token: str,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        parts: Mapping[str, Mapping[str, Tensor]] | None = None,
        kept: Collection[str] = frozenset(),
    ) -> None:
        """Start an update. The tensors in ``kept`` (the base of an adapter, sent earlier) may be omitted, but only
        together. ``parts`` are views of some tensors by name; such a tensor is sent whole or as all of its parts."""
        self.token = token
        self.version = version
        self.result: Future[SyncResult] = Future()
        """The result, or `SyncError`."""
        self.senders_done = 0
        """Number of trainer ranks that have sent their share."""
        self._parts = parts or {}
        self._whole_of = {part: name for name, found in self._parts.items() for part in found}
        self._targets = {**tensors, **{part: view for found in self._parts.values() for part, view in found.items()}}
        self._distinct, self._tied = list_distinct_names(tensors), group_tied_names(tensors)
        self._kept = {*kept, *(part for name in kept for part in self._parts.get(name, ()))}
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
        """Verify a bucket and write its tensors. Raises `SyncError`; the model may then be partly updated."""
        if not self.is_open:
            raise SyncError(f"{self._where}: already finished; no more buckets are accepted")
        try:
            self._verify_checksum(bucket)
            for name, tensor in unpack(bucket):
                self._check(name, tensor)
                self._targets[name].copy_(tensor)
                self._written.add(name)
        except SyncError as error:
            self.fail(error)
            raise

    def _verify_checksum(self, bucket: Bucket) -> None:
        received = checksum(bucket.data)
        self._sums.append(BucketSum(index=bucket.index, num_bytes=bucket.data.numel(), checksum=received))
        if received != bucket.checksum:
            raise SyncError(
                f"{self._where}: bucket {bucket.index} has checksum {received:016x}, expected {bucket.checksum:016x}"
            )

    def _check(self, name: str, tensor: Tensor) -> None:
        own = self._targets.get(name)
        if own is None:
            raise SyncError(f"{self._where}: the engine's model has no tensor {name!r}")
        if name in self._written:
            raise SyncError(f"{self._where}: tensor {name!r} was sent twice")
        other = next((other for other in self._overlapping(name) if other in self._written), None)
        if other is not None:
            raise SyncError(f"{self._where}: tensors {name!r} and {other!r} were both sent, but one contains the other")
        if (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
            sent, expected = f"{tensor.dtype} {tuple(tensor.shape)}", f"{own.dtype} {tuple(own.shape)}"
            raise SyncError(f"{self._where}: tensor {name!r} has {sent}, expected {expected}")
        twin = next((other for other in self._tied.get(name, ()) if other in self._written), None)
        if twin is not None and not torch.equal(own.cpu(), tensor.cpu()):
            raise SyncError(
                f"{self._where}: tensors {twin!r} and {name!r} are tied, but were sent with different values"
            )

    def _overlapping(self, name: str) -> Collection[str]:
        """Return the tensors that share memory with a tensor because one is a part of the other."""
        return self._parts.get(name) or ([self._whole_of[name]] if name in self._whole_of else ())

    def finish(self) -> SyncResult:
        """Complete the update. Raises `SyncError` if a tensor is missing."""
        if not self.is_open:
            return self.result.result()
        missing = self._missing()
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

    def _missing(self) -> list[str]:
        kept = self._kept if self._written.isdisjoint(self._kept) else ()
        missing: list[str] = []
        for name in self._distinct:
            if name in kept or not self._written.isdisjoint(self._tied.get(name, {name})):
                continue
            parts = self._parts.get(name, {name: None})
            absent = [part for part in parts if part not in self._written]
            missing += absent if len(absent) < len(parts) else [name]
        return missing

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
