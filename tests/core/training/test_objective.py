"""Loss and gradient of one step are the same for every split, and equal literal formulas without code of the
packages."""

import copy
import dataclasses
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid import BatchRef, Role
from plasmid.components.objective_inputs import TokenLoss
from plasmid.testing.batches import random_batch
from plasmid_training.algorithms.grpo import GRPO
from plasmid_training.batches.collate import collate
from plasmid_training.batches.rank_batch import split
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.head.logprobs import TokenScores, token_logprobs
from plasmid_training.objective.metrics import StepMetrics
from plasmid_training.objective.objective import compute_advantages, loss_inputs, microbatch_loss, step_weights
from torch import nn

VOCAB = 40
ONE = Microbatching(unit="samples", size=1)
WHOLE = Microbatching(unit="samples", size=100)
SHAPE = [[1, 2, 1], [1], [3, 1], [1, 1]]
SETTINGS = {
    "plain": {},
    "kl and entropy": {"kl_coef": 0.3, "entropy_coef": 0.1, "kl_estimator": "k3"},
    "dual clip": {"dual_clip": 1.5, "clip_low": 0.1, "clip_high": 0.3},
    "unbiased kl": {"kl_coef": 0.2, "unbiased_kl": True, "kl_estimator": "low_var_kl", "normalize_std": False},
    "rollout as old": {"old_policy": "rollout", "monitor_kl": True},
}


class Causal(nn.Module):
    """A causal model in which every token depends on all previous ones: a GRU between an embedding and a head."""

    def __init__(self, dtype, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.gru = nn.Embedding(VOCAB, 8), nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, VOCAB)
        self.to(dtype)

    def hidden(self, input_ids):
        return self.gru(self.embed(input_ids))[0]


def score(model, rows, rank):
    """Return the model's log-probabilities [T] of this rank's loss tokens."""
    scores = torch.zeros(len(rows.token_ids), dtype=model.head.weight.dtype)
    for microbatch in (m for step in rank.steps for m in step.microbatches):
        m = collate(rows, microbatch, table_index=rank.samples)
        with torch.no_grad():
            scores[m.token_index] = forward(model, m).logprobs
    return scores


def forward(model, m, **options):
    hidden = torch.cat([model.hidden(ids[None])[0] for ids in m.token_ids.split(m.lengths)])[m.source]
    head = {"bias": model.head.bias, "chunk_size": 5}
    return token_logprobs(hidden, model.head.weight, m.targets, m.temperatures, kept=m.kept, **head, **options)


def gradient(algorithm, batch, models, *, num_ranks=1, microbatching=WHOLE, step=0):
    """Return loss, metrics and gradient (one flat tensor) of one step, with ranks simulated one after another."""
    policy, old, ref = (copy.deepcopy(m) for m in models)
    metrics, weights, ranks = StepMetrics(), None, split(batch, num_ranks=num_ranks, microbatching=microbatching)
    for rank in ranks:
        rows = rank.fetch()
        scores = {Role.REFERENCE: score(ref, rows, rank)} if algorithm.needs().reference else {}
        if Role.POLICY in algorithm.roles(steps=batch.steps):
            scores[Role.POLICY] = score(old, rows, rank)
        advantages = compute_advantages(algorithm, rank, rows, scores, all_reduce=torch.clone)
        weights = step_weights(algorithm, rank, step)
        for microbatch in rank.steps[step].microbatches:
            m = collate(rows, microbatch, table_index=rank.samples)
            now = forward(policy, m, entropy_grad=algorithm.weights_need_entropy())
            inputs = loss_inputs(rank, m, now, scores=scores, advantages=advantages)
            part = microbatch_loss(algorithm, inputs, weights[m.table_index])
            part.loss.backward()
            metrics.add(dataclasses.replace(part, mismatch=None))
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
    return metrics.reduce(torch.clone, rank=0, num_ranks=1), flat


def three_models(dtype):
    """Return policy, old policy and reference, close to each other so that some ratios are clipped and others are
    not."""
    models = [Causal(dtype) for _ in range(3)]
    for seed, model in enumerate(models):
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.data += 0.15 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return models


def literal(algorithm, batch, models, step):
    """Return loss and gradient in fp64 from the formulas, by sample and token, without padding or shared prefixes."""
    samples = [s for group in batch.groups for s in group.whole.get().samples]
    group_of = {s.id: group for group in batch.groups for s in group.whole.get().samples}
    order = list(dict.fromkeys(s.rollout_id for s in samples))
    size = len(order) // batch.steps
    in_step = order[step * size : (step + 1) * size]
    chosen = [s for s in samples if s.rollout_id in in_step]
    buckets = {}
    for s in chosen:
        key = {"per-rollout": s.rollout_id, "per-prompt": s.group_id}.get(algorithm.reduction, "all")
        buckets.setdefault(key, [])
        advantage = literal_advantage(algorithm, group_of[s.id].whole.get().samples, s)
        ids, temperature = torch.tensor(s.token_ids, dtype=torch.int64), s.sampling.temperature
        rows = [torch.log_softmax(m.head(m.hidden(ids[None])[0]) / np.float32(temperature).item(), -1) for m in models]
        for t in range(1, len(ids)):
            if not s.loss_mask[t]:
                continue
            kept = literal_kept(s, t)
            now, before, base = (row[t - 1, ids[t]] - row[t - 1, kept].logsumexp(0) for row in rows)
            engine = torch.tensor(float(s.rollout_logprobs[t]))
            if s.kept is not None:
                engine = engine - float(s.kept.log_mass[t])
            pi_old = engine if algorithm.old_policy == "rollout" else before.detach()
            if algorithm.old_policy == "trainer" and batch.steps == 1:
                pi_old = now.detach()
            distribution = rows[0][t - 1]
            entropy = -(distribution.exp() * distribution).sum()
            buckets[key].append(literal_token_loss(algorithm, now, pi_old, base.detach(), entropy, advantage))
    tokens = [x for bucket in buckets.values() for x in bucket]
    if algorithm.reduction in ("per-rollout", "per-prompt"):
        loss = sum(sum(bucket) / len(bucket) for bucket in buckets.values() if bucket) / len(buckets)
    elif algorithm.reduction == "per-token":
        loss = sum(tokens) / len(tokens)
    else:
        loss = sum(tokens) / (algorithm.constant_length * len(in_step))
    grads = torch.autograd.grad(loss, list(models[0].parameters()))
    return loss.item(), torch.cat([g.flatten() for g in grads])


def literal_kept(sample, t):
    """Return the ids of the tokens that token t was sampled from."""
    if sample.kept is None:
        return torch.arange(VOCAB)
    found = sample.kept.token_ids[sample.kept.offsets[t] : sample.kept.offsets[t + 1]]
    return torch.tensor(found, dtype=torch.int64) if len(found) else torch.arange(VOCAB)


def literal_advantage(algorithm, group, sample):
    rewards: dict[str, list[float]] = {}
    for s in group:
        rewards.setdefault(s.rollout_id, []).append(s.reward)
    values = [sum(r) / len(r) for r in rewards.values()]
    mean = sum(values) / len(values)
    if not algorithm.normalize_std or len(values) == 1:
        return sample.reward - mean
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return (sample.reward - mean) / (std + algorithm.std_eps)


def literal_token_loss(algorithm, now, old, ref, entropy, advantage):
    ratio = torch.exp(now - old)
    clipped = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
    loss = max(-ratio * advantage, -clipped * advantage)
    if algorithm.dual_clip != "off" and advantage < 0:
        loss = min(loss, torch.tensor(-algorithm.dual_clip * advantage))
    if algorithm.kl_coef:
        kl = torch.exp(ref - now) - (ref - now) - 1
        if algorithm.unbiased_kl:
            kl = kl * ratio
        loss = loss + algorithm.kl_coef * kl
    return loss - algorithm.entropy_coef * entropy


REDUCTIONS = ["per-rollout", "per-token", "per-prompt", "constant"]
STEPS = [(1, 0.0), (3, 0.0), (3, 0.7)]
"""Number of steps, and share of tokens with a kept set."""


@pytest.mark.parametrize(
    ("reduction", "steps", "restricted"),
    [
        pytest.param(reduction, *both, marks=() if reduction == "per-token" or both == STEPS[-1] else pytest.mark.long)
        for reduction, both in product(REDUCTIONS, STEPS)
    ],
)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_what_the_formulas_say(name, reduction, steps, restricted):
    length = 11 if reduction == "constant" else None
    algorithm = GRPO(**SETTINGS[name], reduction=reduction, constant_length=length)
    batch = dataclasses.replace(random_batch([*SHAPE, [1]], seed=3, restricted=restricted), steps=steps)
    models = three_models(torch.float64)
    clipped = 0.0
    for step in range(steps):
        microbatching = Microbatching(unit="tokens", size=30)
        metrics, got = gradient(algorithm, batch, models, num_ranks=2, microbatching=microbatching, step=step)
        loss, expected = literal(algorithm, batch, models, step)
        # advantages and the engine's log-probabilities are fp32 in the tested code
        assert metrics["train/loss"] == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
        assert expected.abs().max() > 1e-3
        clipped += metrics["train/clip_fraction"]
    assert (clipped > 0) == (steps > 1 or algorithm.old_policy == "rollout"), "the clip must be put to the test"


@given(
    st.sampled_from(list(SETTINGS)),
    st.sampled_from(["per-rollout", "per-token", "per-prompt", "constant"]),
    st.integers(1, 4),
    st.builds(Microbatching, unit=st.sampled_from(["samples", "tokens"]), size=st.integers(1, 80)),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-6)]),
)
@settings(max_examples=12, deadline=None)
def test_the_gradient_does_not_depend_on_the_split(name, reduction, num_ranks, microbatching, seed, restricted, dtype):
    length = 9 if reduction == "constant" else None
    algorithm = GRPO(**SETTINGS[name], reduction=reduction, constant_length=length)
    batch = dataclasses.replace(random_batch(SHAPE, seed=seed, restricted=restricted), steps=2)
    number_type, tolerance = dtype
    models = three_models(number_type)
    whole_metrics, whole = gradient(algorithm, batch, models)
    metrics, parts = gradient(algorithm, batch, models, num_ranks=num_ranks, microbatching=microbatching)
    torch.testing.assert_close(parts, whole, rtol=0, atol=tolerance)
    assert metrics == pytest.approx(whole_metrics, abs=10 * tolerance)


@pytest.mark.parametrize("restricted", [0.0, 0.7])
def test_the_gradient_does_not_depend_on_the_order_of_groups(restricted):
    batch = random_batch(SHAPE, seed=5, restricted=restricted)
    turned = BatchRef(index=0, groups=batch.groups[::-1])
    algorithm, models = GRPO(kl_coef=0.1), three_models(torch.float64)
    a, b = gradient(algorithm, batch, models), gradient(algorithm, turned, models)
    torch.testing.assert_close(a[1], b[1], rtol=0, atol=1e-12)
    assert a[0] == pytest.approx(b[0], abs=1e-12)


@pytest.mark.parametrize("restricted", [0.0, 0.7])
def test_padding_does_not_change_gradient_or_metrics(restricted):
    batch = random_batch(SHAPE, seed=6, silent=0.0, restricted=restricted)
    algorithm, models = GRPO(kl_coef=0.1, entropy_coef=0.2), three_models(torch.float64)
    alone_each = gradient(algorithm, batch, models, microbatching=ONE)
    padded = gradient(algorithm, batch, models)
    torch.testing.assert_close(alone_each[1], padded[1], rtol=0, atol=1e-12)
    assert alone_each[0] == pytest.approx(padded[0], abs=1e-12)


@pytest.mark.parametrize("reduction", ["per-rollout", "per-token", "per-prompt"])
def test_a_batch_without_loss_tokens_has_a_gradient_of_zero_everywhere(reduction):
    batch = random_batch(SHAPE, silent=1.0)
    algorithm = GRPO(kl_coef=0.1, entropy_coef=0.2, reduction=reduction)
    metrics, grads = gradient(algorithm, batch, three_models(torch.float64), num_ranks=2)
    assert torch.equal(grads, torch.zeros_like(grads))
    assert set(metrics.values()) == {0.0}


def test_an_idle_rank_takes_part_with_a_gradient_of_zero():
    batch = random_batch([[1]], silent=0.0)
    rank = split(batch, num_ranks=2, microbatching=ONE)[1]
    rows, algorithm, model = rank.fetch(), GRPO(entropy_coef=0.1), Causal(torch.float64)
    advantages = compute_advantages(algorithm, rank, rows, {}, all_reduce=torch.clone)
    m = collate(rows, rank.steps[0].microbatches[0], table_index=rank.samples)
    now = forward(model, m, entropy_grad=True)
    inputs = loss_inputs(rank, m, now, scores={}, advantages=advantages)
    part = microbatch_loss(algorithm, inputs, step_weights(algorithm, rank, 0)[m.table_index])
    part.loss.backward()
    assert part.loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_difference_to_the_engine_is_reported_over_loss_tokens():
    batch = random_batch(SHAPE, seed=7)
    models = three_models(torch.float64)
    metrics, _ = gradient(GRPO(), batch, models, num_ranks=2)
    differences = []
    for s in (s for group in batch.groups for s in group.whole.get().samples):
        ids = torch.tensor(s.token_ids, dtype=torch.int64)
        rows = torch.log_softmax(models[0].head(models[0].hidden(ids[None])[0]) / s.sampling.temperature, -1)
        differences += [
            abs(rows[t - 1, ids[t]].item() - float(s.rollout_logprobs[t])) for t in range(1, len(ids)) if s.loss_mask[t]
        ]
    assert metrics["train/logprob_diff_mean"] == pytest.approx(sum(differences) / len(differences), abs=1e-6)
    assert metrics["train/logprob_diff_max"] == pytest.approx(max(differences), abs=1e-6)


class WrongShapes(GRPO):
    def advantages(self, inputs):
        return super().advantages(inputs)[:-1]

    def loss(self, inputs):
        result = super().loss(inputs)
        return TokenLoss(loss=result.loss.sum(), metrics=result.metrics)


def test_an_algorithm_that_returns_another_shape_is_an_error():
    rank = split(random_batch(SHAPE, silent=0.0), num_ranks=1, microbatching=WHOLE)[0]
    rows = rank.fetch()
    tokens = int(rows.loss_mask.sum())
    assert tokens > 1
    with pytest.raises(ValueError, match=rf"advantages must have one value per loss token \({tokens}\), got shape"):
        compute_advantages(WrongShapes(), rank, rows, {}, all_reduce=torch.clone)
    m = collate(rows, range(rows.num_samples), table_index=rank.samples)
    inputs = loss_inputs(
        rank, m, TokenScores(m.rollout_logprobs, None), scores={}, advantages=torch.zeros(len(rows.token_ids))
    )
    with pytest.raises(ValueError, match=r"the loss must have one value per token \(\d+\), got shape \(\)"):
        microbatch_loss(WrongShapes(), inputs, torch.ones(tokens))
