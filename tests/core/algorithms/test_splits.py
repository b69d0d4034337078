"""Loss and gradient of every algorithm do not depend on how a step is split over ranks and microbatches."""

from dataclasses import replace

import pytest
import torch
from algorithm_cases import advantage_inputs, loss_inputs, make_case, split_over_ranks, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_family import ALGORITHMS

shapes = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4)


def part_of(inputs, samples):
    """Return a microbatch of some samples, numbered from 0; its log-probabilities share the graph of the whole
    batch."""
    chosen = torch.isin(inputs.sample_index, torch.tensor(samples))
    numbers = torch.full((inputs.num_samples,), -1)
    numbers[samples] = torch.arange(len(samples))
    names = (
        "logprobs",
        "entropy",
        "old_logprobs",
        "rollout_logprobs",
        "ref_logprobs",
        "teacher_logprobs",
        "advantages",
        "table_index",
        "token_ids",
        "versions",
    )
    return chosen, replace(
        inputs,
        num_samples=len(samples),
        sample_index=numbers[inputs.sample_index[chosen]],
        **{name: getattr(inputs, name)[chosen] for name in names},
    )


@given(shapes, st.sampled_from(list(ALGORITHMS)), st.integers(1, 4), st.integers(0, 10**6), st.data())
@settings(max_examples=60, deadline=None)
def test_a_step_of_any_algorithm_does_not_depend_on_the_split(shape, name, num_ranks, seed, data):
    algorithm, case = ALGORITHMS[name][0], make_case(shape, seed)
    count = case.table.num_samples
    whole = loss_inputs(case, algorithm.advantages(advantage_inputs(case)))
    weights = weights_of(case, algorithm)
    loss = (algorithm.loss(whole).loss * weights).sum()
    expected = torch.autograd.grad(loss, whole.logprobs)[0]
    advantages = split_over_ranks(case, num_ranks, algorithm.advantages)
    split = loss_inputs(case, advantages)
    microbatch_of = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    got = 0.0
    for microbatch in range(4):  # some of them may be empty
        samples = [i for i in range(count) if microbatch_of[i] == microbatch]
        chosen, inputs = part_of(split, samples)
        got = got + (algorithm.loss(inputs).loss * weights[chosen]).sum()
    assert got.item() == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(got, split.logprobs)[0], expected, rtol=0, atol=1e-12)
