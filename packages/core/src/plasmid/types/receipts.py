"""Compare the results of both sides of a weight sync, and merge those of several senders."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SyncError
from .samples import SyncResult


def compare(sent: SyncResult, received: SyncResult) -> None:
    """Raise a `SyncError` that names the first difference between sent and received weights."""
    where = f"weight sync of version {sent.version}"
    if received.version != sent.version:
        raise SyncError(f"{where}: the engine reports version {received.version}")
    if len(received.buckets) != len(sent.buckets):
        raise SyncError(f"{where}: {len(sent.buckets)} buckets were sent, {len(received.buckets)} received")
    for ours, theirs in zip(sent.buckets, received.buckets, strict=True):
        if ours.index != theirs.index:
            raise SyncError(f"{where}: bucket {ours.index} was sent where bucket {theirs.index} was received")
        if ours.num_bytes != theirs.num_bytes:
            raise SyncError(
                f"{where}: bucket {ours.index} was sent with {ours.num_bytes} bytes and received "
                f"with {theirs.num_bytes}"
            )
        if ours.checksum != theirs.checksum:
            raise SyncError(
                f"{where}: bucket {ours.index} ({ours.num_bytes} bytes) was sent with checksum {ours.checksum:016x} "
                f"and received with {theirs.checksum:016x}"
            )
    if received.num_tensors != sent.num_tensors:
        raise SyncError(f"{where}: {sent.num_tensors} tensors were sent, {received.num_tensors} received")


def merge_results(results: Sequence[SyncResult]) -> SyncResult:
    """Return the result of a sync from those of all ranks, each of which sent a share; times are of the slowest."""
    phases = {name: max(r.phases.get(name, 0.0) for r in results) for r in results for name in r.phases}
    return SyncResult(
        version=results[0].version,
        num_tensors=sum(result.num_tensors for result in results),
        buckets=tuple(sorted((b for result in results for b in result.buckets), key=lambda bucket: bucket.index)),
        seconds=max(result.seconds for result in results),
        phases=phases,
    )
