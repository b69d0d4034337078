"""The critic's code in all trainers: returns, sum of the value loss, explained variance."""

import math
import threading
from functools import partial

import numpy as np
import pytest
import torch
from plasmid.components.objective_inputs import TokenLoss
from plasmid.testing.batches import random_batch
from plasmid.types import Role
from plasmid_training.algorithms.ppo import PPO
from plasmid_training.batches.collate import collate
from plasmid_training.batches.rank_batch import split
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.objective.objective import (
    compute_returns,
    explained_variance,
    step_weights,
    value_microbatch_loss,
)

SHAPE = [[1, 2], [1, 1, 1], [1]]


def together(parts, function):
    """Return the results of ``function(part, all_reduce)`` for every part, each in a thread. ``all_reduce`` sums over
    them."""
    barrier, slots, results = threading.Barrier(len(parts)), {}, {}

    def all_reduce(index, tensor):
        slots[index] = tensor
        barrier.wait()
        total = sum(slots.values())
        barrier.wait()
        return total

    def work(index):
        results[index] = function(parts[index], partial(all_reduce, index))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(parts))]


def test_explained_variance_is_numpys_and_the_same_over_parts():
    draw = np.random.default_rng(0)
    returns = draw.normal(1e4, 1.0, 50).astype(np.float32)  # E[x^2] - E[x]^2 in fp32 would be inaccurate here
    values = (returns + draw.normal(0, 0.5, 50)).astype(np.float32)
    expected = 1 - (returns - values).astype(np.float64).var() / returns.astype(np.float64).var()
    whole = explained_variance(torch.from_numpy(values), torch.from_numpy(returns), torch.clone)
    assert whole == pytest.approx(expected, rel=1e-6)
    parts = [(torch.from_numpy(values[a:b]), torch.from_numpy(returns[a:b])) for a, b in ((0, 7), (7, 7), (7, 50))]
    results = together(parts, lambda part, all_reduce: explained_variance(*part, all_reduce))
    assert results == pytest.approx([expected] * 3, rel=1e-6)


def test_a_critic_that_knows_the_returns_explains_all_and_their_mean_nothing():
    returns = torch.tensor([1.0, 2.0, 6.0])
    assert explained_variance(returns.clone(), returns, torch.clone) == 1
    assert explained_variance(torch.full((3,), 3.0), returns, torch.clone) == pytest.approx(0)


@pytest.mark.parametrize("returns", [[], [2.0], [2.0, 2.0]])
def test_returns_that_do_not_vary_leave_nothing_to_explain(returns):
    assert explained_variance(torch.zeros(len(returns)), torch.tensor(returns), torch.clone) is None


def pieces(*, num_ranks=1, size=100_000):
    batch = random_batch(SHAPE, seed=2)
    ranks = split(batch, num_ranks=num_ranks, microbatching=Microbatching(unit="tokens", size=size))
    draw = torch.Generator().manual_seed(0)
    ids, lengths = batch.table().sample_ids, batch.table().lengths.tolist()
    values = {id_: torch.rand(length, generator=draw) for id_, length in zip(ids, lengths, strict=True)}
    return ranks, values


def value_loss(algorithm, ranks, values):
    """Return the value loss of the whole step, and the returns by sample, computed over the parts."""
    total, by_sample = 0.0, {}
    for rank in ranks:
        rows = rank.fetch()
        old = torch.cat([torch.zeros(0), *(values[id_] for id_ in rows.sample_ids)])
        returns = compute_returns(algorithm, rank, rows, {Role.CRITIC: old}, all_reduce=torch.clone)
        by_sample |= dict(zip(rows.sample_ids, returns.split(rows.lengths().tolist()), strict=True))
        weights = step_weights(algorithm, rank, 0)
        for indices in rank.steps[0].microbatches:
            microbatch = collate(rows, indices, table_index=rank.samples)
            now = old[microbatch.token_index] * 1.5
            loss = value_microbatch_loss(
                algorithm,
                microbatch,
                now,
                old_values=old,
                returns=returns,
                weights=weights[microbatch.table_index],
            )
            assert loss.num_tokens == len(now)
            total += float(loss.loss)
    return total, by_sample


def test_the_value_loss_is_the_mean_over_tokens_of_a_literal_one_for_every_split():
    algorithm = PPO(gamma=0.9, lam=0.7, value_clip=0.1)
    ranks, values = pieces()
    rows, terms = ranks[0].fetch(), []
    whole, returns = value_loss(algorithm, ranks, values)
    rewards = dict(zip(ranks[0].table.sample_ids, ranks[0].table.rewards, strict=True))
    for i, id_ in enumerate(rows.sample_ids):
        seen = np.flatnonzero(rows.loss_mask[rows.offsets[i] : rows.offsets[i + 1]])
        advantage, following = 0.0, 0.0
        for number, t in enumerate(reversed(seen)):
            value = float(values[id_][t])
            delta = (rewards[id_] if number == 0 else 0.0) + 0.9 * following - value
            advantage, following = delta + 0.9 * 0.7 * advantage, value
            target = advantage + value
            assert float(returns[id_][t]) == pytest.approx(target, abs=1e-5)
            now = 1.5 * value
            near = min(max(now, value - 0.1), value + 0.1)
            terms.append(max((now - target) ** 2, (near - target) ** 2))
    assert whole == pytest.approx(math.fsum(terms) / len(terms), rel=1e-5)
    for num_ranks, size in ((1, 12), (2, 100_000), (3, 1)):
        parts, _ = value_loss(algorithm, pieces(num_ranks=num_ranks, size=size)[0], values)
        assert parts == pytest.approx(whole, rel=1e-5)


class WrongShapes(PPO):
    def returns(self, inputs):
        return super().returns(inputs)[:-1]

    def value_loss(self, inputs):
        return TokenLoss(loss=inputs.values.sum(), metrics={})


def test_results_of_the_wrong_shape_are_refused():
    ranks, values = pieces()
    rank, rows = ranks[0], ranks[0].fetch()
    old = torch.cat([values[id_] for id_ in rows.sample_ids])
    with pytest.raises(ValueError, match="returns must have one value per loss token"):
        compute_returns(WrongShapes(), rank, rows, {Role.CRITIC: old}, all_reduce=torch.clone)
    microbatch = collate(rows, range(rows.num_samples), table_index=rank.samples)
    with pytest.raises(ValueError, match="the value loss must have one value per token"):
        value_microbatch_loss(
            WrongShapes(),
            microbatch,
            old[microbatch.token_index],
            old_values=old,
            returns=old,
            weights=torch.ones(microbatch.num_predicted),
        )
