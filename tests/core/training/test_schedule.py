"""Who computes what, for every shape of batch."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.types.batch import BatchTable
from plasmid_training.batches.schedule import Microbatching, balance, deal_to_steps, make_schedule, pack


@st.composite
def tables(draw):
    """A table whose samples belong to rollouts in any interleaving within their group."""
    shape = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=4))
    rollouts, groups, first = [], [], 0
    for group, counts in enumerate(shape):
        of_group = draw(st.permutations([first + r for r, n in enumerate(counts) for _ in range(n)]))
        rollouts += of_group
        groups += [group] * len(of_group)
        first += len(counts)
    seen: dict[int, int] = {}
    index = [seen.setdefault(r, len(seen)) for r in rollouts]
    lengths = draw(st.lists(st.integers(1, 50), min_size=len(index), max_size=len(index)))
    return BatchTable(
        sample_ids=tuple(map(str, range(len(index)))),
        group_index=np.array(groups),
        rollout_index=np.array(index),
        loss_tokens=np.array(lengths) // 2,
        lengths=np.array(lengths),
        rewards=np.zeros(len(index)),
    )


microbatchings = st.builds(Microbatching, unit=st.sampled_from(["samples", "tokens"]), size=st.integers(1, 120))


@given(tables(), st.data(), st.integers(1, 5), microbatchings)
@settings(max_examples=150, deadline=None)
def test_every_sample_is_scheduled_exactly_once(table, data, num_ranks, microbatching):
    steps = data.draw(st.integers(1, int(table.rollout_index.max()) + 1))
    schedule = make_schedule(table, steps=steps, num_ranks=num_ranks, microbatching=microbatching)
    flat = [i for step in schedule.steps for rank in step.ranks for microbatch in rank for i in microbatch]
    assert sorted(flat) == list(range(table.num_samples))
    assert len(schedule.steps) == steps and all(len(step.ranks) == num_ranks for step in schedule.steps)
    for step in schedule.steps:
        assert sorted(i for rank in step.ranks for m in rank for i in m) == list(step.samples)
        assert len({len(rank) for rank in step.ranks}) == 1, "ranks must run equally many microbatches"
        assert any(m for rank in step.ranks for m in rank[-1:]), "a microbatch that is empty on every rank is a waste"


def test_empty_microbatches_fill_a_step_up_to_a_multiple():
    table = BatchTable(
        sample_ids=tuple("abcde"),
        group_index=np.zeros(5, np.int64),
        rollout_index=np.arange(5),
        loss_tokens=np.full(5, 2),
        lengths=np.full(5, 4),
        rewards=np.zeros(5),
    )
    microbatching = Microbatching(unit="samples", size=1, multiple=4)
    (step,) = make_schedule(table, steps=1, num_ranks=1, microbatching=microbatching).steps
    assert [len(microbatch) for microbatch in step.ranks[0]] == [1, 1, 1, 1, 1, 0, 0, 0]


@given(tables(), st.data(), st.integers(1, 4), microbatchings)
@settings(max_examples=100, deadline=None)
def test_microbatches_keep_to_their_size(table, data, num_ranks, microbatching):
    schedule = make_schedule(table, steps=1, num_ranks=num_ranks, microbatching=microbatching)
    for microbatch in (m for step in schedule.steps for rank in step.ranks for m in rank if m):
        padded = len(microbatch) * int(table.lengths[list(microbatch)].max())
        cost = len(microbatch) if microbatching.unit == "samples" else padded
        assert cost <= microbatching.size or len(microbatch) == 1


@given(tables(), st.data())
@settings(max_examples=100, deadline=None)
def test_steps_get_whole_rollouts_in_order_and_equally_many(table, data):
    num_rollouts = int(table.rollout_index.max()) + 1
    steps = deal_to_steps(table, data.draw(st.integers(1, num_rollouts)))
    rollouts = [sorted({int(table.rollout_index[i]) for i in step}) for step in steps]
    assert [r for step in rollouts for r in step] == list(range(num_rollouts))
    assert max(map(len, rollouts)) - min(map(len, rollouts)) <= 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(1, 3))
@settings(deadline=None)
def test_the_fullest_rank_is_within_a_third_of_the_best_possible(lengths, num_ranks):
    held = balance(range(len(lengths)), lengths, num_ranks=num_ranks, equal_counts=False)
    best = min(
        max(sum(n for n, r in zip(lengths, ranks, strict=True) if r == rank) for rank in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(lengths))
    )
    assert max(sum(lengths[i] for i in rank) for rank in held) <= (4 / 3 - 1 / (3 * num_ranks)) * best + 1e-9


def test_balance_of_a_known_case():
    assert balance(range(5), [7, 5, 4, 3, 1], num_ranks=2, equal_counts=False) == ((0, 3), (1, 2, 4))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 6))
def test_equal_counts_differ_by_at_most_one(lengths, num_ranks):
    held = balance(range(len(lengths)), lengths, num_ranks=num_ranks, equal_counts=True)
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_a_sample_longer_than_the_budget_sits_alone():
    assert pack([0, 1, 2, 3], [3, 50, 4, 3], Microbatching(unit="tokens", size=10)) == ((1,), (2, 0), (3,))


def test_the_longest_samples_come_first():
    assert pack([0, 1, 2], [1, 3, 2], Microbatching(unit="samples", size=2)) == ((1, 2), (0,))


def test_more_steps_than_rollouts_are_refused():
    table = BatchTable(
        sample_ids=("a", "b"),
        group_index=np.array([0, 0]),
        rollout_index=np.array([0, 0]),
        loss_tokens=np.array([1, 1]),
        lengths=np.array([2, 2]),
        rewards=np.zeros(2),
    )
    with pytest.raises(ValueError, match="1 rollouts cannot be dealt out to 2 steps"):
        make_schedule(table, steps=2, num_ranks=1, microbatching=Microbatching(unit="samples", size=1))


def test_a_microbatch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one of tokens, got 0"):
        Microbatching(unit="tokens", size=0)
