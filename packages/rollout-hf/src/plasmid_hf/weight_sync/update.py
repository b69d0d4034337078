"""The receiving half of one weight sync: every tensor once, checked before it is written, or an error."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future

import torch
from plasmid.errors import SyncError
from plasmid.protocols import Bucket
from plasmid.types import BucketSum, SyncReceipt
from plasmid_models.sync import checksum, unpack
from torch import Tensor


class WeightUpdate:
    """One policy version on its way into the model. After the first error nothing more is taken."""

    def __init__(self, token: str, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.token = token
        self.version = version
        self.result: Future[SyncReceipt] = Future()
        """The receipt, or `SyncError`."""
        self._tensors = tensors
        self._tied = tied_names(tensors)
        self._started = time.monotonic()
        self._sums: list[BucketSum] = []
        self._written: set[str] = set()

    @property
    def is_open(self) -> bool:
        """False once it has succeeded or failed."""
        return not self.result.done()

    def put(self, bucket: Bucket) -> None:
        """Check a bucket, then write it into the model. Raises `SyncError`; the model is then half old, half new."""
        if not self.is_open:
            raise SyncError(f"{self._where}: has ended; no more buckets are taken")
        try:
            self._check_sum(bucket)
            tensors = list(unpack(bucket))
            for name, tensor in tensors:
                self._check(name, tensor)
        except SyncError as error:
            self.fail(error)
            raise
        for name, tensor in tensors:
            self._tensors[name].copy_(tensor)
            self._written.add(name)

    def _check_sum(self, bucket: Bucket) -> None:
        received = checksum(bucket.data)
        self._sums.append(BucketSum(index=bucket.index, num_bytes=bucket.data.numel(), checksum=received))
        if received != bucket.checksum:
            raise SyncError(
                f"{self._where}: bucket {bucket.index} was sent with checksum {bucket.checksum:016x} and arrived "
                f"with {received:016x}"
            )

    def _check(self, name: str, tensor: Tensor) -> None:
        own = self._tensors.get(name)
        if own is None:
            raise SyncError(f"{self._where}: the engine's model has no tensor {name!r}")
        if name in self._written:
            raise SyncError(f"{self._where}: tensor {name!r} was sent twice")
        if (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
            sent, held = f"{tensor.dtype} {tuple(tensor.shape)}", f"{own.dtype} {tuple(own.shape)}"
            raise SyncError(f"{self._where}: tensor {name!r} was sent as {sent}, the engine holds {held}")
        twin = next((other for other in self._tied.get(name, ()) if other in self._written), None)
        if twin is not None and not torch.equal(own.cpu(), tensor.cpu()):
            raise SyncError(f"{self._where}: tensors {twin!r} and {name!r} are tied but were sent with other values")

    def finish(self) -> SyncReceipt:
        """Account for what has arrived. Raises `SyncError` if a tensor is missing."""
        if not self.is_open:
            return self.result.result()
        missing = [n for n in distinct_names(self._tensors) if self._written.isdisjoint(self._tied.get(n, {n}))]
        if missing:
            error = SyncError(f"{self._where}: {len(missing)} tensors never came, the first is {missing[0]!r}")
            self.fail(error)
            raise error
        receipt = SyncReceipt(
            version=self.version,
            num_tensors=len(self._written),
            buckets=tuple(self._sums),
            seconds=time.monotonic() - self._started,
        )
        self.result.set_result(receipt)
        return receipt

    def fail(self, error: SyncError) -> None:
        """End it. What was written stays written, so the engine must not serve."""
        if self.is_open:
            self.result.set_exception(error)

    @property
    def _where(self) -> str:
        return f"weight sync of version {self.version}"


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """All names of its memory, of every tensor that has several."""
    return {name: names for names in _by_memory(tensors) if len(names) > 1 for name in names}


def distinct_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The first name of every tensor that has memory of its own."""
    return [names[0] for names in _by_memory(tensors)]


def _by_memory(tensors: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tensor.data_ptr(), []).append(name)
    return [tuple(names) for names in found.values()]
