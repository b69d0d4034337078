"""Division of the weights of a sync among several ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plasmid.protocols import SyncPlan
from plasmid.types.receipts import merge_results
from plasmid_models.sync import Gatherable, divide, send_share
from plasmid_models.sync.shares import number_buckets

SIZES = st.lists(st.tuples(st.integers(1, 400), st.sets(st.integers(0, 3), min_size=1)), min_size=1, max_size=30)


def gatherables(sizes):
    return [Gatherable(key=str(i), num_bytes=size, ranks=tuple(sorted(ranks))) for i, (size, ranks) in enumerate(sizes)]


@given(SIZES, st.integers(1, 500))
def test_every_weight_is_sent_once_by_a_rank_that_has_it_in_buckets_of_the_right_size(sizes, bucket_bytes):
    weights = gatherables(sizes)
    rounds = divide(weights, bucket_bytes=bucket_bytes)
    assert sorted(key for owners in rounds for key in owners) == sorted(weight.key for weight in weights)
    for owners in rounds:
        assert list(owners) == sorted(owners, key=int)  # the order of the model
        for rank in set(owners.values()):
            own = [weights[int(key)] for key, owner in owners.items() if owner == rank]
            assert all(rank in weight.ranks for weight in own)
            assert len(own) == 1 or sum(weight.num_bytes for weight in own) <= bucket_bytes
    assert list(number_buckets(rounds).values()) == list(range(len(number_buckets(rounds))))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 5))
def test_shares_differ_by_at_most_the_largest_weight(sizes, num_ranks):
    rounds = divide(gatherables([(size, set(range(num_ranks))) for size in sizes]), bucket_bytes=500)
    sent = [0] * num_ranks
    for owners in rounds:
        for key, rank in owners.items():
            sent[rank] += sizes[int(key)]
    assert max(sent) - min(sent) <= max(sizes)


class Recorder:
    """A wire and its sender in one. Records what was gathered before each bucket."""

    senders = "divided"

    def __init__(self, log, fails=False):
        self.log, self._fails = log, fails

    def open(self, *, rank, version):
        return self

    def send(self, bucket):
        if self._fails:
            raise ConnectionError("wire cut")
        self.log.append(("sent", bucket.index, bucket.names, bucket.is_last))

    def close(self, *, ok):
        self.log.append(("closed", ok))


def share(rounds, rank, log):
    """Yield the tensors of a rank in every round, and record when all gathers of the round are complete."""
    for number, owners in enumerate(rounds):
        log.append(("gathered", number))
        yield [(name, torch.ones(4)) for name, owner in owners.items() if owner == rank]


ROUNDS = [{"a": 0, "b": 1, "c": 0}, {"d": 1}]


def test_a_bucket_is_sent_after_the_gathers_of_its_round_and_before_those_of_the_next():
    results, logs = [], ([], [])
    for rank, log in enumerate(logs):
        plan = SyncPlan(wire=Recorder(log))
        results.append(send_share(share(ROUNDS, rank, log), ROUNDS, plan=plan, version=1, rank=rank))
    assert logs[0] == [
        ("gathered", 0),
        ("sent", 0, ("a", "c"), False),
        ("gathered", 1),
        ("closed", True),
    ]
    assert logs[1] == [
        ("gathered", 0),
        ("sent", 1, ("b",), False),
        ("gathered", 1),
        ("sent", 2, ("d",), True),
        ("closed", True),
    ]
    merged = merge_results(results)
    assert [bucket.index for bucket in merged.buckets] == [0, 1, 2] and merged.num_tensors == 4
    assert merged.seconds == max(result.seconds for result in results)


def test_a_rank_that_fails_still_takes_part_in_all_gathers():
    log = []
    with pytest.raises(ConnectionError, match="wire cut"):
        send_share(share(ROUNDS, 0, log), ROUNDS, plan=SyncPlan(wire=Recorder(log, fails=True)), version=1, rank=0)
    assert log == [("gathered", 0), ("closed", False), ("gathered", 1)]
