"""A vocabulary split over two gloo ranks gives the same results as one rank. The ranks are threads with separate
groups."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plasmid.types.kept_sets import KeptSet
from plasmid.types.top_tokens import TopChoice
from plasmid_training.head.kept_tokens import KeptTokens
from plasmid_training.head.logprobs import token_logprobs
from plasmid_training.head.token_loss import linear_token_loss
from plasmid_training.head.vocab_shard import VocabShard

POSITIONS, HIDDEN, VOCAB = 11, 6, 19
SPLITS = [(0, 9, 19), (0, 2, 19), (0, 19, 19)]  # the last one: a rank without tokens


@pytest.fixture(scope="module")
def groups():
    store = dist.HashStore()

    def join(rank):
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    with ThreadPoolExecutor(2) as threads:
        yield list(threads.map(join, range(2)))


def case(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, HIDDEN, dtype=torch.float64).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, dtype=torch.float64) / HIDDEN**0.5).to(dtype)
    bias = torch.randn(VOCAB, dtype=torch.float64).to(dtype)
    return hidden, weight, bias, torch.randint(0, VOCAB, (POSITIONS,)), torch.rand(POSITIONS) + 0.5


def kept_sets(targets):
    """Return sets on one shard, on both, and the whole vocabulary, alternating by position."""
    sets = [[], [0, 1, 8], [9, 18], [1, 2, 9, 10]] * 3
    sets = [sorted({int(t), *s}) if s else [] for t, s in zip(targets, sets[:POSITIONS], strict=True)]
    return KeptTokens.of(KeptSet.of([np.array(s, np.int32) for s in sets], np.zeros(POSITIONS)))


UP = torch.randn(2, POSITIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(scores, chunk):
    up = UP.to(scores.logprobs.dtype)[:, chunk]
    return (up[0] * scores.logprobs.exp() + up[1] * scores.entropy).sum()


def run(inputs, fused, shard=None, restricted=False):
    """Return log-probabilities, entropies and the gradients of hidden states, weight and bias."""
    leaves = [part.clone().requires_grad_() for part in inputs[:3]]
    arguments = (leaves[0], leaves[1], *inputs[3:])
    options = {"bias": leaves[2], "entropy_grad": True, "chunk_size": 4, "shard": shard}
    options["kept"] = kept_sets(inputs[3]) if restricted else None
    if fused:
        loss, scores = linear_token_loss(*arguments, loss_of, **options)
    else:
        scores = token_logprobs(*arguments, **options)
        loss = loss_of(scores, slice(None))
    return [part.detach() for part in (*scores[:2], *torch.autograd.grad(loss, leaves))]


def on_both(groups, split, inputs, fused, restricted=False):
    hidden, weight, bias, *rest = inputs

    def rank(index):
        part = slice(*split[index : index + 2])
        shard = VocabShard(group=groups[index], first=part.start)
        return run((hidden, weight[part], bias[part], *rest), fused, shard, restricted)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, range(2)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_two_ranks_give_what_one_gives(groups, split, dtype, tolerance, restricted, fused):
    inputs = case(dtype)
    whole = run(inputs, fused, restricted=restricted)
    first, second = on_both(groups, split, inputs, fused, restricted)
    for a, b, expected in zip(first[:3], second[:3], whole[:3], strict=True):
        assert torch.equal(a, b), "what is on all ranks must be the same, bit by bit"
        torch.testing.assert_close(a, expected, rtol=0, atol=tolerance)
    for a, b, expected in zip(first[3:], second[3:], whole[3:], strict=True):
        torch.testing.assert_close(torch.cat([a, b]), expected, rtol=0, atol=tolerance)


def top_loss(scores, chunk):
    return loss_of(scores, chunk) + (UP.to(scores.logprobs.dtype)[0, chunk, None] * scores.top_logprobs.exp()).sum()


def with_top_tokens(inputs, fused, shard=None):
    """Return the 4 most likely tokens and their log-probabilities, those of 3 given tokens, and all gradients."""
    choice = TopChoice(count=4, num_tokens=VOCAB - 1)
    chosen = token_logprobs(*inputs[:2], *inputs[3:], bias=inputs[2], shard=shard, top=choice, chunk_size=4)
    leaves = [part.clone().requires_grad_() for part in inputs[:3]]
    ids = torch.stack([inputs[3], (inputs[3] + 1) % VOCAB, (inputs[3] + 9) % VOCAB], 1).int()
    options = {"bias": leaves[2], "entropy_grad": True, "chunk_size": 4, "shard": shard, "top_ids": ids}
    options["kept"] = kept_sets(inputs[3])
    arguments = (leaves[0], leaves[1], *inputs[3:])
    if fused:
        loss, scores = linear_token_loss(*arguments, top_loss, **options)
    else:
        scores = token_logprobs(*arguments, **options)
        loss = top_loss(scores, slice(None))
    found = (chosen.top_ids, chosen.top_logprobs, scores.top_logprobs, *torch.autograd.grad(loss, leaves))
    return [part.detach() for part in found]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_find_and_score_the_top_tokens_of_one(groups, split, fused):
    inputs = case(torch.float64)
    whole = with_top_tokens(inputs, fused)

    def rank(index):
        part = slice(*split[index : index + 2])
        shard = VocabShard(group=groups[index], first=part.start)
        return with_top_tokens((inputs[0], inputs[1][part], inputs[2][part], *inputs[3:]), fused, shard)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    assert torch.equal(first[0], whole[0]) and torch.equal(second[0], whole[0])
    for a, b, expected in zip(first[1:4], second[1:4], whole[1:4], strict=True):
        torch.testing.assert_close(a, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(b, expected, rtol=0, atol=1e-10)
    for a, b, expected in zip(first[4:], second[4:], whole[4:], strict=True):
        torch.testing.assert_close(torch.cat([a, b]), expected, rtol=0, atol=1e-10)


def test_a_part_without_a_finite_logit_counts_nothing(groups):
    inputs = case(torch.float64)
    hidden, weight, bias, targets, temperatures = inputs
    masked = bias.clone()
    masked[9:] = float("-inf")
    inputs = (hidden, weight, masked, targets % 9, temperatures)
    whole = run(inputs, False)
    first, _ = on_both(groups, SPLITS[0], inputs, False)
    assert all(part.isfinite().all() for part in whole)
    for a, expected in zip(first[:3], whole[:3], strict=True):
        torch.testing.assert_close(a, expected, rtol=0, atol=1e-10)
