"""Buckets, checksums and the sending side of weight syncs."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.errors import SyncError
from plasmid.protocols import SyncPlan
from plasmid.types import BucketSum, SyncResult
from plasmid_models.sync import checksum, compare, make_buckets, send_weights, unpack
from plasmid_models.sync.checksum import ROW

MASK = (1 << 64) - 1


def factor(position):
    """Splitmix64 in plain Python, made odd."""
    x = ((position + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) | 1


def slow_checksum(data: bytes) -> int:
    total = len(data)
    padded = data + bytes(-len(data) % 4)
    for i in range(0, len(padded), 4):
        word = int.from_bytes(padded[i : i + 4], "little", signed=True)
        row, column = divmod(i // 4, ROW)
        total += word * factor(column) * pow(0x9E3779B97F4A7C15, row + 1, 1 << 64)
    return total & MASK


def model_tensors():
    torch.manual_seed(0)
    base = torch.randn(7, 5)
    return [
        ("a.weight", torch.randn(3, 4, dtype=torch.bfloat16)),
        ("b.weight", base.t()),
        ("b.slice", base[:, 1]),
        ("c.bias", torch.randint(-100, 100, (9,), dtype=torch.int8)),
        ("d.empty", torch.zeros(0, 4)),
        ("e.scalar", torch.tensor(3.5, dtype=torch.float64)),
        ("f.tied", base),
        ("g.tied", base),
        ("h.flags", torch.tensor([True, False, True])),
    ]


@given(st.binary(max_size=300))
def test_checksum_equals_a_plain_python_one(data):
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    assert checksum(tensor) == slow_checksum(data)


def test_checksum_of_several_rows_equals_a_plain_python_one():
    data = torch.randint(0, 256, (2 * ROW * 4 + 13,), dtype=torch.uint8)
    assert checksum(data) == slow_checksum(bytes(data.tolist()))


@given(st.integers(0, 4_000), st.integers(0, 31))
@settings(max_examples=50)
def test_a_flipped_bit_changes_the_checksum(word, bit):
    data = torch.arange(4_001, dtype=torch.int32)
    flipped = data.clone()
    flipped[word] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert checksum(flipped) != checksum(data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("distance", [1, 2, 4, 64, 1024, 2 * ROW, 4 * ROW])
def test_swapped_elements_change_the_checksum(dtype, distance):
    data = torch.arange(4 * ROW + 8).remainder(100).to(dtype)
    data[3], data[3 + distance] = 5, -5 if dtype.is_signed else 6  # as floats they differ only in the sign
    swapped = data.clone()
    swapped[3], swapped[3 + distance] = data[3 + distance], data[3]
    assert checksum(swapped) != checksum(data)


def test_checksum_depends_only_on_content():
    data = torch.randn(50, 30).to(torch.bfloat16)
    shifted = torch.zeros(1501, dtype=torch.bfloat16)[1:].copy_(data.view(-1))
    assert checksum(data.t()) == checksum(data.t().contiguous())
    assert checksum(shifted) == checksum(data) == checksum(data.view(torch.int16))


def test_length_counts():
    assert len({checksum(torch.zeros(n, dtype=torch.uint8)) for n in range(9)}) == 9


@pytest.mark.parametrize("bucket_bytes", [1, 50, 64, 10_000])
def test_buckets_come_back_as_the_tensors_that_went_in(bucket_bytes):
    tensors = model_tensors()
    back = [pair for bucket in make_buckets(tensors, bucket_bytes=bucket_bytes) for pair in unpack(bucket)]
    assert [name for name, _ in back] == [name for name, _ in tensors]
    for (_, was), (name, now) in zip(tensors, back, strict=True):
        assert now.dtype == was.dtype and now.shape == was.shape and torch.equal(now, was), name


@given(st.lists(st.integers(0, 400), min_size=1, max_size=30), st.integers(1, 500))
def test_buckets_respect_their_size_and_their_order(sizes, bucket_bytes):
    tensors = [(str(i), torch.full((size,), i, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    buckets = list(make_buckets(tensors, bucket_bytes=bucket_bytes))
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert all(b.data.numel() <= bucket_bytes or len(b.names) == 1 for b in buckets)
    assert all(b.checksum == checksum(b.data) for b in buckets)
    assert [n for b in buckets for n in b.names] == [n for n, _ in tensors]


def test_buckets_read_the_stream_lazily():
    read = []

    def stream():
        for i in range(10):
            read.append(i)
            yield str(i), torch.zeros(16, dtype=torch.uint8)

    next(make_buckets(stream(), bucket_bytes=32))
    assert read == [0, 1, 2]


@dataclass
class Recorder:
    """A wire and its sender in one."""

    senders: str = "first"
    fail_at: int = -1
    log: list = field(default_factory=list)

    def open(self, *, rank, version):
        self.log.append(("open", rank, version))
        return self

    def send(self, bucket):
        if bucket.index == self.fail_at:
            raise ConnectionError("wire cut")
        self.log.append(bucket)

    def close(self, *, ok):
        self.log.append(("close", ok))


def test_sending_opens_sends_all_and_closes():
    wire = Recorder()
    result = send_weights(iter(model_tensors()), plan=SyncPlan(wire=wire, bucket_bytes=100), version=3, rank=0)
    buckets = wire.log[1:-1]
    assert wire.log[0] == ("open", 0, 3) and wire.log[-1] == ("close", True)
    assert result.version == 3 and result.num_tensors == len(model_tensors())
    assert result.buckets == tuple(
        BucketSum(index=b.index, num_bytes=b.data.numel(), checksum=checksum(b.data)) for b in buckets
    )
    assert len(buckets) > 2


def test_sync_result_reports_the_time_of_each_phase():
    wire = Recorder()
    result = send_weights(model_tensors(), plan=SyncPlan(wire=wire, bucket_bytes=100), version=1, rank=0)
    assert result.phases.keys() == {"gather", "hand_over"} and min(result.phases.values()) > 0
    assert sum(result.phases.values()) == pytest.approx(result.seconds)


def test_ranks_that_do_not_send_still_take_part_in_gathering():
    wire, read = Recorder(), []
    stream = (read.append(name) or (name, tensor) for name, tensor in model_tensors())
    result = send_weights(stream, plan=SyncPlan(wire=wire), version=1, rank=1)
    assert (wire.log, result.buckets, len(read)) == ([], (), len(model_tensors()))
    send_weights(iter(model_tensors()), plan=SyncPlan(wire=Recorder(senders="all")), version=1, rank=1)


def test_a_failing_sender_is_closed_and_the_stream_is_read_to_its_end():
    wire, read = Recorder(fail_at=1), []
    stream = (read.append(name) or (name, tensor) for name, tensor in model_tensors())
    with pytest.raises(ConnectionError, match="wire cut"):
        send_weights(stream, plan=SyncPlan(wire=wire, bucket_bytes=64), version=1, rank=0)
    assert wire.log[-1] == ("close", False)
    assert len(read) == len(model_tensors())


def sync_result(*sums):
    buckets = tuple(BucketSum(index=i, num_bytes=64, checksum=s) for i, s in enumerate(sums))
    return SyncResult(version=2, num_tensors=5, buckets=buckets)


def test_sync_results_may_differ_in_time():
    compare(sync_result(1, 2), replace(sync_result(1, 2), seconds=9.0))


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (replace(sync_result(1, 2), version=1), "weight sync of version 2: the engine reports version 1"),
        (sync_result(1), "weight sync of version 2: 2 buckets were sent, 1 received"),
        (
            sync_result(1, 3),
            "weight sync of version 2: bucket 1 (64 bytes) was sent with checksum 0000000000000002 "
            "and received with 0000000000000003",
        ),
        (
            replace(sync_result(1), buckets=(sync_result(1).buckets[0], BucketSum(index=1, num_bytes=60, checksum=2))),
            "weight sync of version 2: bucket 1 was sent with 64 bytes and received with 60",
        ),
        (replace(sync_result(1, 2), num_tensors=4), "weight sync of version 2: 5 tensors were sent, 4 received"),
    ],
)
def test_the_error_names_the_first_difference_of_sync_results(received, message):
    with pytest.raises(SyncError) as error:
        compare(sync_result(1, 2), received)
    assert str(error.value) == message
