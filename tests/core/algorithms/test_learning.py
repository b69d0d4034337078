"""Every algorithm learns a small task: three tokens for each of four prompts, each with one right value.

The policy is a table of logits, so a run of 25 batches takes a fraction of a second. Whole runs with real models are in
tests/end_to_end.
"""

from dataclasses import replace

import pytest
import torch
from plasmid.testing.batches import make_group, make_sample
from plasmid.types import Prompt, Role
from plasmid.types.batch import BatchRef
from plasmid.types.kept_sets import KeptSet
from plasmid_training.algorithms.cispo import CISPO
from plasmid_training.algorithms.dapo import DAPO
from plasmid_training.algorithms.dr_grpo import DrGRPO
from plasmid_training.algorithms.grpo import GRPO
from plasmid_training.algorithms.gspo import GSPO
from plasmid_training.algorithms.opd import OPD
from plasmid_training.algorithms.parts.correction import Correction
from plasmid_training.algorithms.ppo import PPO
from plasmid_training.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from plasmid_training.algorithms.rloo import RLOO, ReMax
from plasmid_training.algorithms.sft import SFT
from plasmid_training.batches.collate import collate
from plasmid_training.batches.rank_batch import split
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.head.logprobs import TokenScores, token_logprobs
from plasmid_training.objective.objective import (
    compute_advantages,
    compute_returns,
    loss_inputs,
    microbatch_loss,
    step_weights,
    value_microbatch_loss,
)

PROMPTS, LENGTH, VOCAB = 4, 3, 5
RIGHT = torch.tensor([[(p + t) % VOCAB for t in range(LENGTH)] for p in range(PROMPTS)])
BATCHES = 25
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
REWARDED = {
    "grpo": GRPO(),
    "grpo with a kl": GRPO(kl_coef=0.01, monitor_kl=True, entropy_coef=0.001),
    "grpo, decoupled": GRPO(old_policy="decoupled", correction=Correction(mode="truncate")),
    "dapo": DAPO(),
    "dr-grpo": DrGRPO(constant_length=LENGTH),
    "rloo": RLOO(reward_kl_coef=0.01),
    "remax": ReMax(),
    "reinforce-plus-plus": ReinforcePlusPlus(),
    "reinforce-plus-plus-baseline": ReinforcePlusPlusBaseline(),
    "gspo": GSPO(clip_low=0.1, clip_high=0.2),
    "cispo": CISPO(opsm=0.5),
    "ppo": PPO(lam=0.9, value_clip=1.0),
}
QUICK = ("grpo", "gspo", "cispo", "ppo")
"""Algorithms with a quick test; `test_family.py` checks the formulas of the others."""


def mark_long(names, quick):
    """Return the names as parameters, and mark all but the quick ones as long."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in names]


class Run:
    """A policy, a critic, a reference and a teacher, all of them tables."""

    def __init__(self, algorithm, seed, steps=2, top_p=1.0):
        self.algorithm, self.steps, self.top_p = algorithm, steps, top_p
        self.random = torch.Generator().manual_seed(seed)
        self.policy = (0.1 * torch.randn(PROMPTS, LENGTH, VOCAB, generator=self.random)).requires_grad_()
        self.reference = self.policy.detach().clone()
        self.teacher = 2.0 * torch.randn(PROMPTS, LENGTH, VOCAB, generator=self.random)
        self.critic = torch.zeros(PROMPTS, LENGTH, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.policy, self.critic], lr=0.15)

    def expected_reward(self):
        """Return the mean probability of the right tokens."""
        return self.policy.softmax(-1).gather(-1, RIGHT[..., None]).mean().item()

    def kl_to_teacher(self):
        p, q = self.policy.log_softmax(-1), self.teacher.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1).mean().item()

    def batch(self):
        return BatchRef(index=0, groups=tuple(map(self.group, range(PROMPTS))), steps=self.steps)

    def group(self, p):
        prompt = Prompt(id=f"p{p}", token_ids=torch.tensor([p], dtype=torch.int32).numpy())
        logprobs = self.policy[p].detach().log_softmax(-1)
        probs, ids = logprobs.exp().sort(descending=True)
        probs = probs * (probs.cumsum(-1) - probs < self.top_p)
        sets = [ids[t, probs[t] > 0].int().numpy() for t in range(LENGTH)]
        kept = KeptSet.of(sets, probs.sum(-1).log().numpy())
        samples = []
        for i in range(4):
            tokens = ids.gather(-1, torch.multinomial(probs, 1, generator=self.random))[:, 0]
            if isinstance(self.algorithm, SFT):
                tokens = RIGHT[p]
            by_engine = logprobs.gather(-1, tokens[:, None])[:, 0] + 0.02 * torch.randn(LENGTH, generator=self.random)
            reward = (tokens == RIGHT[p]).float().mean().item()
            samples.append(
                make_sample(
                    prompt,
                    tokens.int().numpy(),
                    id=f"{p}/{i}",
                    rollout_id=f"{p}/{i}",
                    group_id=p,
                    logprobs=by_engine.numpy(),
                    kept=kept if self.top_p < 1 else None,
                    reward=reward,
                )
            )
        greedy = (logprobs.argmax(-1) == RIGHT[p]).float().mean().item()
        return replace(make_group(prompt, samples, id=p), baseline=greedy)

    def at(self, table, m):
        """Look up a table [P, ...] for each predicted token, by its prompt and the number of tokens before it."""
        begins = torch.tensor([0, *m.lengths]).cumsum(0)
        first = begins[m.sample_index]
        return table[m.token_ids[first], m.source - first]

    def logprobs(self, table, m):
        logits = self.at(table, m)  # the trainers' own code, with the table as head and one-hot hidden states
        one_hot = torch.eye(len(logits))
        return token_logprobs(one_hot, logits.T, m.targets, m.temperatures, kept=m.kept).logprobs

    def train(self):
        algorithm, steps = self.algorithm, self.steps
        (rank,) = split(self.batch(), num_ranks=1, microbatching=Microbatching(unit="samples", size=5))
        rows = rank.fetch()
        whole = collate(rows, range(rows.num_samples), table_index=rank.samples)
        tables = {Role.POLICY: self.policy, Role.REFERENCE: self.reference, Role.TEACHER: self.teacher}
        scores = {}
        for role in algorithm.roles(steps=steps):
            scores[role] = torch.zeros(len(rows.token_ids))
            found = self.at(self.critic, whole) if role is Role.CRITIC else self.logprobs(tables[role], whole)
            scores[role][whole.token_index] = found.detach()
        advantages = compute_advantages(algorithm, rank, rows, scores, all_reduce=torch.clone)
        if algorithm.needs().critic:
            returns = compute_returns(algorithm, rank, rows, scores, all_reduce=torch.clone)
        for index, step in enumerate(rank.steps):
            self.optimizer.zero_grad()
            weights = step_weights(algorithm, rank, index)
            for part in step.microbatches:
                m = collate(rows, part, table_index=rank.samples)
                now = TokenScores(self.logprobs(self.policy, m), self.entropy(m))
                inputs = loss_inputs(rank, m, now, scores=scores, advantages=advantages)
                microbatch_loss(algorithm, inputs, weights[m.table_index]).loss.backward()
                if algorithm.needs().critic:
                    value_microbatch_loss(
                        algorithm,
                        m,
                        self.at(self.critic, m),
                        old_values=scores[Role.CRITIC],
                        returns=returns,
                        weights=weights[m.table_index],
                    ).loss.backward()
            self.optimizer.step()

    def entropy(self, m):
        logprobs = self.at(self.policy, m).log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("name", mark_long(REWARDED, QUICK))
@SEEDS
def test_the_reward_rises_within_25_batches_of_16_rollouts(name, seed):
    run = Run(REWARDED[name], seed)
    assert run.expected_reward() < 0.25
    for _ in range(BATCHES):
        run.train()
    assert run.expected_reward() > 0.85


RESTRICTED = {
    "grpo, truncated": GRPO(old_policy="decoupled", correction=Correction(mode="truncate")),
    "grpo, rollout": GRPO(old_policy="rollout", kl_coef=0.01),
    "gspo, masked": GSPO(old_policy="decoupled", correction=Correction(mode="mask", level="geometric")),
}


@pytest.mark.parametrize("name", mark_long(RESTRICTED, ["grpo, truncated"]))
@SEEDS
def test_the_reward_rises_under_top_p_with_the_kept_sets_replayed(name, seed):
    run = Run(RESTRICTED[name], seed, top_p=0.9)
    assert run.expected_reward() < 0.25
    for _ in range(BATCHES):
        run.train()
    assert run.expected_reward() > 0.75  # once only the right token can be sampled, there is nothing left to learn


@SEEDS
def test_distillation_moves_the_policy_to_the_teacher(seed):
    run = Run(OPD(), seed)
    before = run.kl_to_teacher()
    for _ in range(2 * BATCHES):
        run.train()
    assert before > 0.8
    assert run.kl_to_teacher() < 0.05 * before


@SEEDS
def test_demonstrations_are_learned(seed):
    run = Run(SFT(), seed)
    for _ in range(BATCHES):
        run.train()
    assert -torch.log_softmax(run.policy, -1).gather(-1, RIGHT[..., None]).mean().item() < 0.05


@SEEDS
def test_the_critic_learns_what_rewards_to_expect(seed):
    run = Run(PPO(lam=1.0, whiten=False, value_clip="off"), seed)
    run.optimizer = torch.optim.Adam([run.critic], lr=0.03)
    for _ in range(3 * BATCHES):
        run.train()
    expected = run.policy.softmax(-1).gather(-1, RIGHT[..., None]).mean(1)  # [PROMPTS, 1]: mean over the tokens
    first = run.critic[:, 0].detach()
    torch.testing.assert_close(first, expected[:, 0].detach(), rtol=0, atol=0.1)
