"""Assignment of samples to ranks and microbatches, for every shape of batch."""

import os
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.types.batch import BatchTable
from plasmid_training.batches.sample_costs import SampleCosts, attention_length
from plasmid_training.batches.schedule import (
    Microbatching,
    assign_to_ranks,
    balance,
    make_schedule,
    pack,
    split_into_steps,
)

DISTRIBUTIONS = int(os.environ.get("PLASMID_TEST_DISTRIBUTIONS", "100"))
"""Number of random length distributions that must be balanced; 10,000 take two minutes."""


@st.composite
def tables(draw):
    """Create a table whose samples belong to rollouts, interleaved arbitrarily within their group."""
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
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=50, deadline=None)
def test_microbatches_keep_to_their_size(table, data, num_ranks, microbatching):
    schedule = make_schedule(table, steps=1, num_ranks=num_ranks, microbatching=microbatching)
    for microbatch in (m for step in schedule.steps for rank in step.ranks for m in rank if m):
        padded = len(microbatch) * int(table.lengths[list(microbatch)].max())
        cost = len(microbatch) if microbatching.unit == "samples" else padded
        assert cost <= microbatching.size or len(microbatch) == 1


@given(tables(), st.data())
@settings(max_examples=50, deadline=None)
def test_steps_get_whole_rollouts_in_order_and_equally_many(table, data):
    num_rollouts = int(table.rollout_index.max()) + 1
    steps = split_into_steps(table, data.draw(st.integers(1, num_rollouts)))
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


def table_of(lengths, groups=None, prefixes=None):
    """Create a table in which every sample is a rollout; each has its own group by default."""
    count = len(lengths)
    return BatchTable(
        sample_ids=tuple(map(str, range(count))),
        group_index=np.arange(count) if groups is None else np.asarray(groups),
        rollout_index=np.arange(count),
        loss_tokens=np.asarray(lengths) // 2,
        lengths=np.asarray(lengths),
        rewards=np.zeros(count),
        shared_prefixes=None if prefixes is None else np.asarray(prefixes),
    )


def test_a_sample_longer_than_the_budget_sits_alone():
    costs = SampleCosts.of(table_of([3, 50, 4, 3]))
    assert pack([0, 1, 2, 3], costs, Microbatching(unit="tokens", size=10)) == ((1,), (2, 0), (3,))


def test_the_longest_samples_come_first():
    costs = SampleCosts.of(table_of([1, 3, 2]))
    assert pack([0, 1, 2], costs, Microbatching(unit="samples", size=2)) == ((1, 2), (0,))


def test_packed_tokens_of_a_shared_prefix_are_counted_once():
    table = table_of([10, 9, 8, 12], [0, 0, 0, 1], [7, 7, 7, 0])
    for size, expected in ((12, ((3,), (0, 1), (2,))), (25, ((3, 0, 1, 2),)), (24, ((3,), (0, 1, 2)))):
        microbatching = Microbatching(unit="packed", size=size, min_saving=0.0)
        schedule = make_schedule(table, steps=1, num_ranks=1, microbatching=microbatching)
        assert schedule.steps[0].ranks[0] == expected
        assert schedule.prefixes == (7, 7, 7, 0)


def test_prefixes_that_save_too_little_are_not_shared():
    table = table_of([10, 10, 10, 10], [0, 0, 1, 1], [2, 2, 3, 3])  # saves 2 of 20 and 3 of 20 tokens
    shared = {x: SampleCosts.of(table, min_saving=x).prefixes for x in (None, 0.0, 0.11, 0.16)}
    assert shared == {None: [0, 0, 0, 0], 0.0: [2, 2, 3, 3], 0.11: [0, 0, 3, 3], 0.16: [0, 0, 0, 0]}


@given(st.data(), st.integers(1, 60), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_samples_with_prefixes_are_scheduled_once_and_fit(data, size, num_ranks):
    groups, prefixes, lengths = [], [], []
    for group in range(data.draw(st.integers(1, 5))):
        owns = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
        prefix = data.draw(st.integers(0, 15))
        groups += [group] * len(owns)
        prefixes += [prefix] * len(owns)
        lengths += [prefix + own for own in owns]
    table = table_of(lengths, groups, prefixes)
    microbatching = Microbatching(unit="packed", size=size, min_saving=0.0)
    (step,) = make_schedule(table, steps=1, num_ranks=num_ranks, microbatching=microbatching).steps
    assert sorted(i for rank in step.ranks for m in rank for i in m) == list(range(len(lengths)))
    for microbatch in (m for rank in step.ranks for m in rank if m):
        tokens = sum(lengths[i] - prefixes[i] for i in microbatch)
        tokens += sum(prefixes[next(i for i in microbatch if groups[i] == g)] for g in {groups[i] for i in microbatch})
        assert tokens <= size or len(microbatch) == 1


def test_groups_are_split_over_ranks_only_if_this_improves_the_balance():
    costs = SampleCosts.of(table_of([12] * 8, [0] * 4 + [1] * 4, [10] * 8), min_saving=0.0)
    two = assign_to_ranks(tuple(range(8)), costs, num_ranks=2, equal_counts=False)
    assert sorted(map(sorted, two)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    alone = SampleCosts.of(table_of([12] * 4, [0] * 4, [3] * 4), min_saving=0.0)
    assert sorted(map(len, assign_to_ranks((0, 1, 2, 3), alone, num_ranks=2, equal_counts=False))) == [2, 2]


def random_lengths(draw):
    """Return lengths of one of four kinds of distributions, where no sample exceeds 5% of a rank's FLOPs."""
    num_ranks, quadratic = int(draw.integers(2, 17)), float(draw.choice([np.inf, 9000.0, 500.0]))
    count = int(num_ranks * draw.integers(20, 80))
    kind = draw.integers(4)
    if kind == 0:
        lengths = draw.lognormal(5.3, draw.uniform(0.1, 1.5), count)
    elif kind == 1:
        lengths = draw.uniform(1, draw.integers(2, 8000), count)
    elif kind == 2:
        lengths = np.where(draw.random(count) < draw.random(), 8000, 100)
    else:
        lengths = draw.pareto(draw.uniform(0.8, 3), count) * 100
    lengths = np.maximum(1, lengths).astype(np.int64)
    while True:
        flops = lengths + lengths.astype(float) ** 2 / quadratic
        largest = flops > 0.05 * flops.sum() / num_ranks
        if not largest.any():
            return lengths, num_ranks, quadratic
        if largest.all():
            lengths = np.concatenate([lengths, lengths])
        lengths = np.where(largest & (lengths > 1), lengths // 2 + 1, lengths)
        lengths = np.concatenate([lengths, lengths[:num_ranks]])


def test_ranks_are_within_a_twentieth_of_the_lower_bound_of_flops_with_equally_many_microbatches():
    draw = np.random.default_rng(0)
    for _ in range(DISTRIBUTIONS):
        lengths, num_ranks, quadratic = random_lengths(draw)
        flops = lengths + lengths.astype(float) ** 2 / quadratic
        microbatching = Microbatching(unit="packed", size=16384, attention_length=quadratic)
        (step,) = make_schedule(table_of(lengths), steps=1, num_ranks=num_ranks, microbatching=microbatching).steps
        loads = [sum(flops[i] for microbatch in rank for i in microbatch) for rank in step.ranks]
        assert max(loads) <= 1.05 * max(flops.sum() / num_ranks, flops.max())
        assert len({len(rank) for rank in step.ranks}) == 1


def test_a_hundred_thousand_samples_are_planned_in_a_second():
    draw = np.random.default_rng(0)
    table = table_of(115 + draw.lognormal(5.3, 0.7, 100_000).astype(np.int64), np.arange(100_000) // 8, [115] * 100_000)
    seconds = []
    while len(seconds) < 3 and not any(each < 1 for each in seconds):
        start = time.process_time()
        for saving in (None, 0.2):
            microbatching = Microbatching(unit="packed", size=16384, attention_length=9000.0, min_saving=saving)
            make_schedule(table, steps=4, num_ranks=64, microbatching=microbatching)
        seconds.append((time.process_time() - start) / 2)
    assert min(seconds) < 1


def test_the_length_at_which_attention_costs_as_much_as_the_rest():
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 16,
        "vocab_size": 100,
    }
    weights = 2 * (2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16) + 800
    length = attention_length(config)
    forward = 2 * 2 * (2 * 16) * length**2 / 2  # two products with 2 layers of 4 heads, half of the pairs
    assert 3.5 * forward == pytest.approx(6 * weights * length)
    experts = config | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    assert attention_length(experts) > length
    assert attention_length({}) == float("inf")


def test_linear_attention_costs_the_same_for_every_token():
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    sizes |= {"intermediate_size": 16, "vocab_size": 100}
    delta = {"linear_num_key_heads": 2, "linear_key_head_dim": 3, "linear_num_value_heads": 4}
    delta |= {"linear_value_head_dim": 5, "linear_conv_kernel_dim": 4}
    config = sizes | delta | {"model_type": "qwen3_next", "num_hidden_layers": 4}  # three linear layers, one full
    weights = 2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * (2 * 6 + 2 * 20 + 2 * 4 + 20) + 4 * 3 * 8 * 16 + 800
    length = attention_length(config)
    assert 3.5 * 2 * (2 * 16) * length**2 / 2 == pytest.approx(6 * weights * length)
    kinds = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
    assert attention_length(config | {"layer_types": kinds}) < length
    assert attention_length({"text_config": config}) == length


def test_more_steps_than_rollouts_are_refused():
    table = BatchTable(
        sample_ids=("a", "b"),
        group_index=np.array([0, 0]),
        rollout_index=np.array([0, 0]),
        loss_tokens=np.array([1, 1]),
        lengths=np.array([2, 2]),
        rewards=np.zeros(2),
    )
    with pytest.raises(ValueError, match="1 rollouts cannot be split into 2 steps"):
        make_schedule(table, steps=2, num_ranks=1, microbatching=Microbatching(unit="samples", size=1))


def test_a_microbatch_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"must be at least 1 \(tokens\), got 0"):
        Microbatching(unit="tokens", size=0)
