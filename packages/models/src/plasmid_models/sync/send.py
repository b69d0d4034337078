"""Sender of a weight sync, which runs on every trainer rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from plasmid.protocols import Bucket, Sender, SyncPlan
from plasmid.types import BucketSum, SyncResult
from torch import Tensor

from .buckets import make_bucket, make_buckets
from .shares import Round, number_buckets

Named = tuple[str, Tensor]


def send_weights(named_tensors: Iterable[Named], *, plan: SyncPlan, version: int, rank: int) -> SyncResult:
    """Send all tensors over the plan's wire. All ranks call it, because the stream may gather each tensor from them.

    A rank that does not send only takes part in the gathers; its result is empty. After a sender fails, the stream is
    still read to its end, because the other ranks wait in the same gathers.
    """
    stream = iter(named_tensors)
    if plan.wire.senders == "first" and rank > 0:
        started = time.perf_counter()
        _drain(stream)
        return SyncResult(version=version, num_tensors=0, buckets=(), seconds=time.perf_counter() - started)
    buckets = make_buckets(stream, bucket_bytes=plan.bucket_bytes)
    return _send(buckets, stream, plan=plan, version=version, rank=rank)


def send_share(
    tensors: Iterable[list[Named]], rounds: Sequence[Round], *, plan: SyncPlan, version: int, rank: int
) -> SyncResult:
    """Send this rank's share of the tensors over the plan's wire, one bucket per round; returns the share's result.

    All ranks call it together with the same ``rounds``. ``tensors`` yields this rank's tensors in every round. A rank
    sends its bucket only after all gathers of the round, so no gather waits for a receiver that waits for an earlier
    bucket.
    """
    stream = iter(tensors)
    return _send(_share_of(stream, rounds, rank), stream, plan=plan, version=version, rank=rank)


def _share_of(stream: Iterator[list[Named]], rounds: Sequence[Round], rank: int) -> Iterator[Bucket]:
    numbers = number_buckets(rounds)
    for number, own in enumerate(stream):
        index = numbers.get((number, rank))
        if index is not None:
            yield make_bucket(index, own, is_last=index == len(numbers) - 1)


def _send(
    buckets: Iterator[Bucket], stream: Iterator[object], *, plan: SyncPlan, version: int, rank: int
) -> SyncResult:
    """Send all buckets, which are made from ``stream``."""
    started = time.perf_counter()
    try:
        sender = plan.wire.open(rank=rank, version=version)
        sums, num_tensors, gathering = _send_all(buckets, sender)
    except Exception:
        _drain(stream)
        raise
    seconds = time.perf_counter() - started
    return SyncResult(
        version=version,
        num_tensors=num_tensors,
        buckets=tuple(sums),
        seconds=seconds,
        phases={"gather": gathering, "hand_over": seconds - gathering},
    )


def _send_all(buckets: Iterator[Bucket], sender: Sender) -> tuple[list[BucketSum], int, float]:
    """Send all buckets; the last result is the seconds spent on making them, the rest was spent in the sender."""
    sums: list[BucketSum] = []
    num_tensors = 0
    gathering = 0.0
    ok = False
    try:
        began = time.perf_counter()
        for bucket in buckets:
            gathering += time.perf_counter() - began
            sender.send(bucket)
            sums.append(BucketSum(index=bucket.index, num_bytes=bucket.data.numel(), checksum=bucket.checksum))
            num_tensors += len(bucket.names)
            began = time.perf_counter()
        ok = True
    finally:
        sender.close(ok=ok)
    return sums, num_tensors, gathering


def _drain(stream: Iterator[object]) -> None:
    for _ in stream:
        pass
