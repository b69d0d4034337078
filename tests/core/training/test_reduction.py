"""Loss weights, compared with sums written as loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.testing.batches import random_batch
from plasmid_training.batches.schedule import split_into_steps
from plasmid_training.objective.objective import sample_weights

shapes = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4)


def mean(values):
    return sum(values) / len(values)


def reduced_by_hand(table, samples, losses, reduction, constant_length):
    """Return the loss of a step from a list of token losses per sample, by its definition."""
    of = {"per-rollout": table.rollout_index, "per-prompt": table.group_index}
    if reduction in of:
        tokens: dict[int, list[float]] = {}
        for i in samples:
            tokens.setdefault(int(of[reduction][i]), []).extend(losses[i])
        return mean([mean(t) if t else 0.0 for t in tokens.values()])
    every = [x for i in samples for x in losses[i]]
    if reduction == "per-token":
        return sum(every) / max(len(every), 1)
    return sum(every) / (constant_length * len({int(table.rollout_index[i]) for i in samples}))


@given(
    shapes, st.integers(0, 10**6), st.sampled_from(["per-rollout", "per-token", "per-prompt", "constant"]), st.data()
)
@settings(max_examples=60, deadline=None)
def test_weights_give_the_reduction_that_the_definition_gives(shape, seed, reduction, data):
    table = random_batch(shape, seed=seed, silent=0.3).table()
    steps = data.draw(st.integers(1, sum(map(len, shape))))
    length = 7 if reduction == "constant" else None
    random = np.random.default_rng(seed)
    losses = [random.normal(size=int(n)).tolist() for n in table.loss_tokens]
    for samples in split_into_steps(table, steps):
        weights = sample_weights(table, samples, reduction, constant_length=length)
        got = sum(weights[i] * sum(losses[i]) for i in range(table.num_samples))
        assert got == pytest.approx(reduced_by_hand(table, samples, losses, reduction, length), abs=1e-12)


def test_samples_of_one_rollout_count_once_and_silent_rollouts_still_count():
    batch = random_batch([[2, 1]], silent=0.0)
    table = batch.table()
    table.loss_tokens[:] = [3, 1, 0]
    assert sample_weights(table, (0, 1, 2), "per-rollout", constant_length=None)[:2].tolist() == [1 / 8, 1 / 8]


def test_samples_of_other_steps_weigh_nothing():
    table = random_batch([[1, 1, 1]], silent=0.0).table()
    weights = sample_weights(table, (0, 2), "per-token", constant_length=None)
    assert weights[1] == 0 and weights[0] == weights[2] == 1 / (table.loss_tokens[0] + table.loss_tokens[2])


@pytest.mark.parametrize("reduction", ["per-rollout", "per-token", "per-prompt", "constant"])
def test_a_step_without_loss_tokens_has_finite_weights(reduction):
    table = random_batch([[1, 2], [1]], silent=1.0).table()
    assert table.loss_tokens.sum() == 0
    weights = sample_weights(table, range(4), reduction, constant_length=5 if reduction == "constant" else None)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(("reduction", "length"), [("constant", None), ("per-token", 5)])
def test_a_constant_length_goes_with_the_constant_reduction_only(reduction, length):
    table = random_batch([[1]]).table()
    with pytest.raises(ValueError, match="constant_length requires reduction = 'constant'"):
        sample_weights(table, (0,), reduction, constant_length=length)
