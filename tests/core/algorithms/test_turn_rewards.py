"""Rewards per turn, from scores to the advantages of every rank's tokens, against loops in fp64."""

import numpy as np
import pytest
import torch
from plasmid.testing.batches import make_group, make_sample
from plasmid.types import Prompt, Role
from plasmid.types.batch import BatchRef, Rows
from plasmid_training.algorithms.dr_grpo import DrGRPO
from plasmid_training.algorithms.grpo import GRPO
from plasmid_training.algorithms.ppo import PPO
from plasmid_training.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from plasmid_training.algorithms.rloo import RLOO
from plasmid_training.batches.rank_batch import split
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.objective.objective import advantage_inputs

TURNS = [
    [[(2, 0.5), (3, -1.0)], [(1, 1.0), (2, 0.0), (2, 2.0)], [(4, 0.25)]],
    [[(1, 1.5), (1, 0.0)], [(3, 0.5), (2, 0.5)]],
    [[(2, None)], [(2, None)]],
]
"""Number of tokens and reward of each turn, by group and sample; a sample of the last group has no turns."""
REST = 0.75
"""Reward of every sample besides those of its turns, for example for its format."""


def make_batch():
    """Turns are separated by two tokens of the environment."""
    random, groups = np.random.default_rng(3), []
    for group, rollouts in enumerate(TURNS):
        prompt = Prompt(id=f"p{group}", token_ids=np.arange(3, dtype=np.int32))
        samples = []
        for i, turns in enumerate(rollouts):
            mask, rewards = [], {}
            for count, reward in turns:
                mask += [True] * count
                if reward is not None:
                    rewards[3 + len(mask) - 1] = reward
                mask += [False] * 2
            samples.append(
                make_sample(
                    prompt,
                    random.integers(0, 40, len(mask)).astype(np.int32),
                    id=f"{group}/{i}",
                    rollout_id=f"{group}/{i}",
                    group_id=group,
                    mask=mask,
                    reward=REST + sum(rewards.values()),
                    token_rewards=rewards,
                )
            )
        groups.append(make_group(prompt, samples, id=group))
    return BatchRef(index=0, groups=tuple(groups))


def loss_tokens():
    """Return (group, rollout, turn, is last of its turn, is last of its sample) of every loss token, in order."""
    for group, rollouts in enumerate(TURNS):
        for i, turns in enumerate(rollouts):
            for turn, (count, _) in enumerate(turns):
                for k in range(count):
                    last = k == count - 1
                    yield group, i, turn, last, last and turn == len(turns) - 1


def turn_return(group, i, turn):
    return REST + sum(reward or 0.0 for _, reward in TURNS[group][i][turn:])


def over_ranks(num_ranks, compute, roles=()):
    """Return the advantages of all loss tokens in the order of the batch, computed rank by rank."""
    found = {}
    for rank in split(make_batch(), num_ranks=num_ranks, microbatching=Microbatching(unit="samples", size=1)):
        rows = rank.fetch()
        values = {role: torch.linspace(-1, 1, len(rows.token_ids), dtype=torch.float64) for role in roles}
        inputs = advantage_inputs(rank, rows, values, all_reduce=lambda t: t)
        advantages = compute(inputs)
        for sample in rank.samples:
            found[sample] = advantages[inputs.sample_index == sample]
    return torch.cat([found[sample] for sample in sorted(found)])


def divided_by_the_deviation(own, others):
    std = np.std([own, *others], ddof=1) + 1e-6 if others else 1.0
    return (own - np.mean([own, *others])) / std


def minus_the_mean(own, others):
    return own - np.mean([own, *others])


def minus_the_others(own, others):
    return own - np.mean(others) if others else 0.0


GROUP_BASELINES = {
    "grpo": (GRPO(baseline="turn"), divided_by_the_deviation),
    "dr-grpo": (DrGRPO(baseline="turn", constant_length=4), minus_the_mean),
    "rloo": (RLOO(baseline="turn"), minus_the_others),
    "reinforce-plus-plus-baseline": (ReinforcePlusPlusBaseline(baseline="turn"), minus_the_mean),
}
"""Algorithms, and the advantage of a turn given its return and those of the same turn in the other rollouts."""


WHITENED = "reinforce-plus-plus-baseline"
"""Algorithms that need sums over all ranks; `over_ranks` computes one rank after another."""


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [(kind, n) for kind in GROUP_BASELINES for n in (1, 2, 3) if kind != WHITENED or n == 1]
)
def test_turns_are_compared_with_the_same_turn_of_other_rollouts(kind, num_ranks):
    algorithm, advantage = GROUP_BASELINES[kind]
    got = over_ranks(num_ranks, lambda inputs: algorithm.policy_advantages(inputs).double())
    expected = []
    for group, i, turn, _, _ in loss_tokens():
        others = [j for j in range(len(TURNS[group])) if j != i and turn < len(TURNS[group][j])]
        expected.append(advantage(turn_return(group, i, turn), [turn_return(group, j, turn) for j in others]))
    if kind == WHITENED:
        expected = (np.array(expected) - np.mean(expected)) / np.sqrt(np.var(expected, ddof=1) + 1e-8)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_whole_samples_are_compared_by_default():
    got = over_ranks(1, lambda inputs: GRPO(normalize_std=False).policy_advantages(inputs).double())
    means = [np.mean([turn_return(g, i, 0) for i in range(len(TURNS[g]))]) for g in range(len(TURNS))]
    np.testing.assert_allclose(got, [turn_return(g, i, 0) - means[g] for g, i, *_ in loss_tokens()], atol=1e-6)


def token_reward(group, i, turn, ends_turn, ends_sample):
    reward = TURNS[group][i][turn][1] or 0.0
    return (reward if ends_turn else 0.0) + (REST if ends_sample else 0.0)


def test_returns_of_reinforce_plus_plus_count_what_is_still_to_come():
    gamma = 0.9
    got = over_ranks(1, lambda inputs: ReinforcePlusPlus(gamma=gamma).policy_advantages(inputs).double())
    tokens, returns = list(loss_tokens()), []
    for at, token in enumerate(tokens):
        own = [other for other in tokens[at:] if other[:2] == token[:2]]
        returns.append(sum(gamma**k * token_reward(*other) for k, other in enumerate(own)))
    centred = np.array(returns) - np.mean(returns)
    np.testing.assert_allclose(got, centred / np.sqrt(np.var(returns, ddof=1) + 1e-8), atol=1e-6)


def test_estimates_of_ppo_see_the_rewards_of_turns():
    algorithm, seen = PPO(whiten=False, gamma=0.95, lam=0.8), []

    def compute(inputs):
        seen.append(inputs.values)
        return algorithm.policy_advantages(inputs).double()

    got = over_ranks(1, compute, roles=(Role.CRITIC,))
    values, tokens, expected = seen[0].tolist(), list(loss_tokens()), []
    for at in range(len(tokens)):
        total, k, place = 0.0, 0, at
        while place < len(tokens) and tokens[place][:2] == tokens[at][:2]:
            after = 0.0 if tokens[place][4] else values[place + 1]
            total += (0.95 * 0.8) ** k * (token_reward(*tokens[place]) + 0.95 * after - values[place])
            k, place = k + 1, place + 1
        expected.append(total)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_reward_beside_the_loss_tokens_belongs_to_the_one_before():
    prompt = Prompt(id="p", token_ids=np.arange(2, dtype=np.int32))
    about = {"id": "0/0", "rollout_id": "0/0", "mask": [True, True, False, True], "reward": 6.0}
    sample = make_sample(prompt, [5, 6, 7, 8], token_rewards={0: 1.0, 4: 2.0, 3: 3.0}, **about)
    rows = Rows.from_samples([sample])
    np.testing.assert_array_equal(rows.token_rewards, [np.nan, np.nan, 1.0, 5.0, np.nan, np.nan])
    np.testing.assert_array_equal(rows.select([0, 0]).token_rewards, np.tile(rows.token_rewards, 2))
    assert Rows.concat([rows, Rows.empty()]).token_rewards is not None
    assert make_group(prompt, [sample]).turn_rewards == ((1.0, 5.0),)
