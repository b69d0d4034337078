"""Sender of a weight sync, which runs on every trainer rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from plasmid.protocols import Sender, SyncPlan
from plasmid.types import BucketSum, SyncReceipt
from torch import Tensor

from .buckets import make_buckets


def send_weights(
    named_tensors: Iterable[tuple[str, Tensor]], *, plan: SyncPlan, version: int, rank: int
) -> SyncReceipt:
    """Send all tensors over the plan's wire. All ranks call it, because the stream may gather each tensor from them.

    A rank that does not send only takes part in the gathers; its receipt is empty. After a sender fails, the stream is
    still read to its end, because the other ranks wait in the same gathers.
    """
    started = time.perf_counter()
    stream = iter(named_tensors)
    if plan.wire.senders == "first" and rank > 0:
        _drain(stream)
        return SyncReceipt(version=version, num_tensors=0, buckets=(), seconds=time.perf_counter() - started)
    try:
        sender = plan.wire.open(rank=rank, version=version)
        sums, num_tensors, gathering = _send(stream, sender, plan.bucket_bytes)
    except Exception:
        _drain(stream)
        raise
    seconds = time.perf_counter() - started
    return SyncReceipt(
        version=version,
        num_tensors=num_tensors,
        buckets=tuple(sums),
        seconds=seconds,
        phases={"gather": gathering, "hand_over": seconds - gathering},
    )


def _send(
    stream: Iterator[tuple[str, Tensor]], sender: Sender, bucket_bytes: int
) -> tuple[list[BucketSum], int, float]:
    """Send all buckets; the last result is the seconds spent on making them, the rest was spent in the sender."""
    sums: list[BucketSum] = []
    num_tensors = 0
    gathering = 0.0
    ok = False
    try:
        began = time.perf_counter()
        for bucket in make_buckets(stream, bucket_bytes=bucket_bytes):
            gathering += time.perf_counter() - began
            sender.send(bucket)
            sums.append(BucketSum(index=bucket.index, num_bytes=bucket.data.numel(), checksum=bucket.checksum))
            num_tensors += len(bucket.names)
            began = time.perf_counter()
        ok = True
    finally:
        sender.close(ok=ok)
    return sums, num_tensors, gathering


def _drain(stream: Iterator[tuple[str, Tensor]]) -> None:
    for _ in stream:
        pass
