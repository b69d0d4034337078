"""Invariances of a step: order of samples and repeated batches; and numerically difficult sums."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import Case, advantage_inputs, loss_inputs, make_case, split_over_ranks, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid_training.algorithms.cispo import CISPO
from plasmid_training.algorithms.dr_grpo import DrGRPO
from plasmid_training.algorithms.grpo import GRPO
from plasmid_training.algorithms.gspo import GSPO
from plasmid_training.algorithms.parts.returns import discounted_sums, whiten
from plasmid_training.algorithms.ppo import PPO
from plasmid_training.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from plasmid_training.algorithms.rloo import RLOO, ReMax
from plasmid_training.batches.schedule import split_into_steps
from plasmid_training.objective.objective import sample_weights

GROUPWISE = {
    "grpo": GRPO(kl_coef=0.1, entropy_coef=0.1),
    "gspo": GSPO(reduction="per-prompt"),
    "cispo": CISPO(),
    "dr-grpo": DrGRPO(constant_length=7),
    "rloo": RLOO(reward_kl_coef=0.2),
    "remax": ReMax(),
}
ALL = GROUPWISE | {"ppo": PPO(), "reinforce++": ReinforcePlusPlus(reduction="per-rollout")}
shapes = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)


def loss_and_slopes(case, algorithm):
    inputs = loss_inputs(case, algorithm.advantages(advantage_inputs(case)))
    loss = (algorithm.loss(inputs).loss * weights_of(case, algorithm)).sum()
    return loss.item(), torch.autograd.grad(loss, inputs.logprobs)[0]


def reordered(case, order):
    table = replace(
        case.table,
        sample_ids=tuple(case.table.sample_ids[i] for i in order),
        **{
            name: getattr(case.table, name)[order]
            for name in ("group_index", "rollout_index", "loss_tokens", "lengths", "rewards", "baselines")
        },
    )
    return Case(table, [replace(t, sample=new) for new, old in enumerate(order) for t in case.of_sample(old)])


@given(shapes, seeds, st.sampled_from(list(ALL)), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_order_of_samples_does_not_matter(shape, seed, name, random):
    case = make_case(shape, seed)
    order = list(range(case.table.num_samples))
    random.shuffle(order)
    turned = reordered(case, order)
    loss, slopes = loss_and_slopes(case, ALL[name])
    got_loss, got_slopes = loss_and_slopes(turned, ALL[name])
    owner = case.column("sample")
    expected = torch.cat([slopes[owner == old] for old in order])
    assert got_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(got_slopes, expected, rtol=0, atol=1e-12)


@given(shapes, seeds, st.sampled_from(list(GROUPWISE)))
@settings(max_examples=25, deadline=None)
def test_every_group_twice_is_the_same_step(shape, seed, name):
    case = make_case(shape, seed)
    n, table = case.table.num_samples, case.table
    doubled = replace(
        table,
        sample_ids=(*table.sample_ids, *(f"{i}'" for i in table.sample_ids)),
        group_index=np.concatenate([table.group_index, table.group_index + 1 + table.group_index.max()]),
        rollout_index=np.concatenate([table.rollout_index, table.rollout_index + 1 + table.rollout_index.max()]),
        **{k: np.tile(getattr(table, k), 2) for k in ("loss_tokens", "lengths", "rewards", "baselines")},
    )
    twice = Case(doubled, [*case.tokens, *(replace(t, sample=t.sample + n) for t in case.tokens)])
    loss, slopes = loss_and_slopes(case, GROUPWISE[name])
    got_loss, got_slopes = loss_and_slopes(twice, GROUPWISE[name])
    assert got_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(got_slopes, slopes.repeat(2) / 2, rtol=0, atol=1e-12)


@given(st.integers(1, 4), st.integers(1, 3), seeds, st.sampled_from(["per-rollout", "constant"]))
@settings(max_examples=20, deadline=None)
def test_steps_of_equally_many_rollouts_average_to_the_whole_batch(steps, per_step, seed, reduction):
    table = make_case([[1] * (steps * per_step)], seed).table
    length = 5 if reduction == "constant" else None
    whole = sample_weights(table, range(table.num_samples), reduction, constant_length=length)
    parts = [sample_weights(table, part, reduction, constant_length=length) for part in split_into_steps(table, steps)]
    np.testing.assert_allclose(sum(parts) / steps, whole, rtol=0, atol=1e-15)


def test_whitening_survives_a_mean_that_dwarfs_the_spread():
    """In fp64, E[x^2] - E[x]^2 would lose all digits of a spread of 1e-3 around a mean of 1e7."""
    case = make_case([[1] * 6], seed=1, silent=0.0)
    small = 1e-3 * torch.randn(len(case.tokens), dtype=torch.float64)
    got = whiten(1e7 + small, advantage_inputs(case))
    expected = (small - small.mean()) / (small.var() + 1e-8).sqrt()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert abs(got.mean().item()) < 1e-5 and got.std().item() == pytest.approx(1, abs=0.01)


def test_whitening_does_not_depend_on_the_split_over_ranks():
    case = make_case([[1, 2], [3, 1, 1]], seed=2)
    values = {id(t): v for v, t in enumerate(case.tokens)}

    def own(inputs):
        held = [values[id(t)] for s in inputs.sample_index.unique().tolist() for t in case.of_sample(s)]
        return whiten(torch.tensor(held, dtype=torch.float64), inputs)

    alone = own(advantage_inputs(case))
    for num_ranks in (2, 3, 8):
        torch.testing.assert_close(split_over_ranks(case, num_ranks, own), alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("factor", [1.0, 0.95, 0.0])
def test_discounted_sums_of_long_samples_are_those_of_a_loop(factor):
    lengths = [1, 700, 3, 256, 255, 1]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    values = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, after = [], 0.0
    for t in reversed(range(len(owner))):
        last = t + 1 == len(owner) or owner[t + 1] != owner[t]
        after = values[t].item() + (0.0 if last else factor * after)
        expected.append(after)
    torch.testing.assert_close(discounted_sums(values, owner, factor).tolist(), expected[::-1], rtol=0, atol=1e-11)
    assert discounted_sums(values[:0], owner[:0], factor).shape == (0,)
