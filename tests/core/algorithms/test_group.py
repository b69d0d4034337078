"""Group baselines against the statistics module."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.types.batch import BatchTable
from plasmid_training.algorithms.grpo import group_advantages


def table(groups, rollouts, rewards):
    n = len(groups)
    seen: dict[int, int] = {}
    return BatchTable(
        sample_ids=tuple(map(str, range(n))),
        group_index=np.array(groups),
        rollout_index=np.array([seen.setdefault(r, len(seen)) for r in rollouts]),
        loss_tokens=np.ones(n, np.int64),
        lengths=np.full(n, 2),
        rewards=np.array(rewards, np.float64),
    )


def by_hand(t, normalize, eps):
    result = []
    for i in range(t.num_samples):
        rewards: dict[int, list[float]] = {}
        for j in range(t.num_samples):
            if t.group_index[j] == t.group_index[i]:
                rewards.setdefault(int(t.rollout_index[j]), []).append(float(t.rewards[j]))
        values = [statistics.fmean(r) for r in rewards.values()]
        centred = float(t.rewards[i]) - statistics.fmean(values)
        spread = statistics.stdev(values) + eps if normalize and len(values) > 1 else 1.0
        result.append(centred / spread)
    return result


@given(
    st.lists(
        st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    st.booleans(),
    st.sampled_from([1e-6, 0.1]),
)
@settings(deadline=None)
def test_advantages_are_those_of_the_statistics_module(shape, normalize, eps):
    rows = [(g, (g, r), x) for g, rollouts in enumerate(shape) for r, xs in enumerate(rollouts) for x in xs]
    t = table(*zip(*rows, strict=True))
    got = group_advantages(t, normalize_std=normalize, std_eps=eps)
    assert got.tolist() == pytest.approx(by_hand(t, normalize, eps), rel=1e-6, abs=1e-7)


def test_uneven_groups_are_identified_by_id_not_position():
    t = table([0, 1, 0, 1, 1], [0, 1, 2, 3, 4], [1.0, 0.0, 3.0, 6.0, 3.0])
    assert group_advantages(t, normalize_std=False, std_eps=1e-6).tolist() == [-1.0, -3.0, 1.0, 3.0, 0.0]


def test_the_standard_deviation_divides_by_one_less_than_the_count():
    t = table([0, 0], [0, 1], [0.0, 2.0])
    assert group_advantages(t, normalize_std=True, std_eps=1e-12).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_the_divisor_may_be_the_count():
    t = table([0, 0], [0, 1], [0.0, 2.0])
    got = group_advantages(t, normalize_std=True, std_eps=1e-12, std_form="population")
    assert got.tolist() == pytest.approx([-1.0, 1.0])


def test_the_statistics_may_leave_the_rollout_out():
    t = table([0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5], [1.0, 3.0, 8.0, 1.0, 4.0, 7.0])
    got = group_advantages(t, normalize_std=True, std_eps=0.5, std_form="leave-one-out")
    apart = [(1 - 5.5) / (12.5**0.5 + 0.5), (3 - 4.5) / (24.5**0.5 + 0.5), (8 - 2) / (2**0.5 + 0.5)]
    assert got.tolist() == pytest.approx(
        [*apart, -3.0, 3.0, 0.0]
    )  # one other rollout has no deviation, and none has no mean


def test_others_that_are_equal_divide_by_nothing():
    t = table([0] * 4, [0, 1, 2, 3], [0.1, 0.1, 0.1, 0.9])
    got = group_advantages(t, normalize_std=True, std_eps=1e-6, std_form="leave-one-out")
    assert got[3] == pytest.approx(0.8)


def test_a_group_of_one_has_no_advantage():
    t = table([0, 1, 1], [0, 1, 2], [5.0, 1.0, 2.0])
    assert group_advantages(t, normalize_std=True, std_eps=1e-6)[0] == 0.0


def test_samples_of_one_rollout_count_once():
    t = table([0, 0, 0, 0], [0, 0, 0, 1], [1.0, 1.0, 1.0, 0.0])
    assert group_advantages(t, normalize_std=False, std_eps=1e-6).tolist() == [0.5, 0.5, 0.5, -0.5]


def test_equal_rewards_give_no_advantage():
    t = table([0] * 3, [0, 1, 2], [0.1] * 3)
    assert np.abs(group_advantages(t, normalize_std=True, std_eps=1e-6)).max() < 1e-9


def test_a_group_that_lost_all_its_samples_does_no_harm():
    t = table([0, 0, 2], [0, 1, 2], [0.0, 1.0, 4.0])
    assert group_advantages(t, normalize_std=False, std_eps=1e-6).tolist() == [-0.5, 0.5, 0.0]
