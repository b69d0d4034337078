"""Distillation over top tokens: loss and gradient equal the formula for every split, and nothing overflows."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.testing.batches import random_batch
from plasmid.types.shared_groups import LocalStore
from plasmid.types.top_tokens import TopTokens
from plasmid_training.algorithms.gkd import GKD
from plasmid_training.algorithms.parts.top_divergence import FLOOR, top_divergence
from plasmid_training.batches.collate import SharedPrefixes, collate
from plasmid_training.batches.rank_batch import split
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.head.logprobs import token_logprobs
from plasmid_training.head.token_loss import linear_token_loss
from plasmid_training.objective.metrics import StepMetrics
from plasmid_training.objective.objective import (
    compute_advantages,
    fused_loss,
    loss_inputs,
    microbatch_loss,
    step_weights,
)

from tests.core.training.test_objective import SHAPE, VOCAB, Causal

COUNT = 6
DIRECTIONS = pytest.mark.parametrize("divergence", ["reverse", "forward"])
WHOLE = Microbatching(unit="samples", size=1000)


def taught_batch(seed, *, steps=1, restricted=0.0):
    """Create a random batch with a teacher's unordered top tokens, some of which include the sampled token."""
    random, groups = np.random.default_rng(seed), []
    batch = random_batch(SHAPE, seed=seed, restricted=restricted, vocab_size=VOCAB)
    for group in batch.groups:
        rows = group.rows.get()
        logits = 2 * random.normal(size=(int(rows.loss_mask.sum()), VOCAB))
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        ids = random.permuted(np.argsort(-logprobs, 1)[:, :COUNT], axis=1)
        top = TopTokens(
            token_ids=ids.astype(np.int32), logprobs=np.take_along_axis(logprobs, ids, 1).astype(np.float32)
        )
        groups.append(replace(group, rows=LocalStore().put(replace(rows, teacher_top=top))))
    return replace(batch, groups=tuple(groups), steps=steps)


def student(dtype):
    model = Causal(dtype)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def gradient(algorithm, batch, model, *, num_ranks=1, microbatching=WHOLE, step=0, fused=False):
    """Return metrics and gradient (one flat tensor) of one step, with ranks simulated one after another."""
    policy, metrics = copy.deepcopy(model), StepMetrics()
    for rank in split(batch, num_ranks=num_ranks, microbatching=microbatching):
        rows = rank.fetch()
        if rows.teacher_top is None:
            rows = replace(rows, teacher_top=TopTokens.unknown(0, COUNT))
        advantages = compute_advantages(algorithm, rank, rows, {}, all_reduce=torch.clone)
        weights = step_weights(algorithm, rank, step)
        for microbatch in rank.steps[step].microbatches:
            m = collate(rows, microbatch, table_index=rank.samples)
            hidden = torch.cat([policy.hidden(ids[None])[0] for ids in m.token_ids.split(m.lengths)])[m.source]
            arguments = (hidden, policy.head.weight, m.targets, m.temperatures)
            options = {"bias": policy.head.bias, "chunk_size": 5, "kept": m.kept, "top_ids": m.teacher_top_ids}
            now = token_logprobs(*arguments, **options)
            inputs = loss_inputs(rank, m, now, scores={}, advantages=advantages)
            part = microbatch_loss(algorithm, inputs, weights[m.table_index])
            loss = part.loss
            if fused:
                chunk_loss = fused_loss(algorithm, inputs, weights[m.table_index])
                loss = linear_token_loss(*arguments, chunk_loss, **options).loss
            loss.backward()
            metrics.add(replace(part, loss=loss, mismatch=None))
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
    return metrics.reduce(torch.clone, rank=0, num_ranks=1), flat


def literally(algorithm, batch, model):
    """Return loss, gradient and mean divergence in fp64, by sample, token and outcome."""
    rollouts, every = {}, []
    for group in batch.groups:
        rows = group.rows.get()
        top, place = rows.teacher_top, 0
        for i, rollout in enumerate(group.rollout_ids):
            begin, end = rows.offsets[i : i + 2].tolist()
            ids = torch.tensor(rows.token_ids[begin:end], dtype=torch.int64)
            temperature = float(rows.temperatures[i])
            logprobs = torch.log_softmax(model.head(model.hidden(ids[None])[0]) / temperature, -1)
            bucket = rollouts.setdefault(rollout, [])
            for t in range(1, end - begin):
                if not rows.loss_mask[begin + t]:
                    continue
                p = [logprobs[t - 1, token].exp() for token in top.token_ids[place].tolist()]
                q = [torch.tensor(value, dtype=torch.float64).exp() for value in top.logprobs[place].tolist()]
                p.append(1 - sum(p))
                q.append(1 - sum(q))
                assert min(p[-1], q[-1]) > FLOOR
                if algorithm.divergence == "reverse":
                    bucket.append(sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True)))
                else:
                    bucket.append(sum(b * torch.log(b / a) for a, b in zip(p, q, strict=True)))
                place += 1
            every += bucket
    loss = sum(sum(bucket) / len(bucket) for bucket in rollouts.values() if bucket) / len(rollouts)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    tokens = [x for bucket in rollouts.values() for x in bucket]
    return loss.item(), torch.cat([g.flatten() for g in grads]), (sum(tokens) / len(tokens)).item()


@DIRECTIONS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("restricted", [0.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_loss_and_gradient_are_the_formula(divergence, fused, restricted, dtype, tolerance):
    """Also with restricted sampling: the divergence is over the whole vocabulary."""
    algorithm, batch = GKD(top_k=COUNT, divergence=divergence), taught_batch(3, restricted=restricted)
    microbatching = Microbatching(unit="tokens", size=30)
    metrics, got = gradient(algorithm, batch, student(dtype), num_ranks=2, microbatching=microbatching, fused=fused)
    loss, expected, mean = literally(algorithm, batch, student(torch.float64))
    assert metrics["train/loss"] == pytest.approx(loss, abs=tolerance)
    assert metrics["train/teacher_kl"] == pytest.approx(mean, abs=max(tolerance, 1e-6))  # metrics are fp32
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


@given(
    st.sampled_from(["reverse", "forward"]),
    st.integers(1, 4),
    st.builds(Microbatching, unit=st.sampled_from(["samples", "tokens"]), size=st.integers(1, 80)),
    st.integers(0, 10**6),
    st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_the_gradient_does_not_depend_on_the_split(divergence, num_ranks, microbatching, seed, fused):
    algorithm, batch, model = (
        GKD(top_k=COUNT, divergence=divergence),
        taught_batch(seed, steps=2),
        student(torch.float64),
    )
    whole_metrics, whole = gradient(algorithm, batch, model)
    metrics, parts = gradient(algorithm, batch, model, num_ranks=num_ranks, microbatching=microbatching, fused=fused)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    assert metrics == pytest.approx(whole_metrics, abs=1e-11)


def test_shared_prefixes_do_not_change_what_is_predicted():
    (rank,) = split(taught_batch(5), num_ranks=1, microbatching=WHOLE)
    rows, groups = rank.fetch(), rank.table.group_index[list(rank.samples)]
    prefixes = SharedPrefixes(groups=groups, lengths=np.ones(len(groups), np.int64))
    plain, shared = (
        collate(rows, range(rows.num_samples), table_index=rank.samples, shared=shared) for shared in (None, prefixes)
    )
    assert shared.prefix_lengths and torch.equal(shared.teacher_top_ids, plain.teacher_top_ids)


def random_logprobs(count, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(count, VOCAB, generator=generator, dtype=torch.float64)).log_softmax(1)


@DIRECTIONS
def test_the_kl_over_top_tokens_is_at_most_the_full_kl(divergence):
    policy, teacher = random_logprobs(50, seed=1), random_logprobs(50, 1.5, seed=2)  # no probability is below FLOOR
    p, q = (policy, teacher) if divergence == "reverse" else (teacher, policy)
    exact = (p.exp() * (p - q)).sum(1)
    last = torch.zeros(50, dtype=torch.float64)
    order = teacher.argsort(1, descending=True)
    for count in range(1, VOCAB):
        ids = order[:, :count]
        found = top_divergence(divergence, policy.gather(1, ids), teacher.gather(1, ids))
        assert (found >= last - 1e-9).all() and (found <= exact + 1e-9).all()
        last = found
    torch.testing.assert_close(last, exact, rtol=0, atol=1e-9)  # the last token's probability follows from the others
    whole = top_divergence(divergence, policy, teacher)
    torch.testing.assert_close(whole, exact, rtol=0, atol=1e-12)
    same = top_divergence(divergence, policy[:, :3], policy[:, :3])
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-15)


@DIRECTIONS
@pytest.mark.parametrize("scale", [0.01, 3.0, 300.0])
def test_certain_distributions_have_finite_losses_and_gradients(divergence, scale):
    policy = random_logprobs(40, scale, seed=3).float()[:, :8].requires_grad_()
    for teacher in (random_logprobs(40, 300.0, seed=4).float()[:, :8], torch.full((40, 8), -1e4)):
        values = top_divergence(divergence, policy, teacher.clamp(min=-1e4))
        (slope,) = torch.autograd.grad(values.sum(), policy)
        assert values.isfinite().all() and slope.isfinite().all() and (values > -1e-4).all()


def test_the_coverage_is_the_teachers_probability_of_its_top_tokens():
    batch = taught_batch(3)
    metrics, _ = gradient(GKD(top_k=COUNT), batch, student(torch.float64))
    tops = [group.rows.get().teacher_top for group in batch.groups]
    expected = np.concatenate([np.exp(top.logprobs).sum(1) for top in tops]).mean()
    assert metrics["train/teacher_coverage"] == pytest.approx(expected, abs=1e-6)
    assert 0 < metrics["train/policy_coverage"] < 0.7 < expected < 1
