"""A vocabulary split over two gloo ranks gives what one rank gives. The ranks are threads with a group each."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plasmid.types.kept_sets import KeptSet
from plasmid_training.head.kept_tokens import KeptTokens
from plasmid_training.head.logprobs import token_logprobs
from plasmid_training.head.token_loss import linear_token_loss
from plasmid_training.head.vocab_shard import VocabShard

POSITIONS, HIDDEN, VOCAB = 11, 6, 19
SPLITS = [(0, 9, 19), (0, 2, 19), (0, 19, 19)]  # the last: a rank without any token


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
    """Sets on one part, on both and of the whole vocabulary, position after position."""
    sets = [[], [0, 1, 8], [9, 18], [1, 2, 9, 10]] * 3
    sets = [sorted({int(t), *s}) if s else [] for t, s in zip(targets, sets[:POSITIONS], strict=True)]
    return KeptTokens.of(KeptSet.of([np.array(s, np.int32) for s in sets], np.zeros(POSITIONS)))


UP = torch.randn(2, POSITIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(scores, chunk):
    up = UP.to(scores.logprobs.dtype)[:, chunk]
    return (up[0] * scores.logprobs.exp() + up[1] * scores.entropy).sum()


def run(inputs, fused, shard=None, restricted=False):
    """Log-probabilities, entropies and the gradients of hidden, weight and bias."""
    leaves = [part.clone().requires_grad_() for part in inputs[:3]]
    arguments = (leaves[0], leaves[1], *inputs[3:])
    options = {"bias": leaves[2], "entropy_grad": True, "chunk_size": 4, "shard": shard}
    options["kept"] = kept_sets(inputs[3]) if restricted else None
    if fused:
        loss, scores = linear_token_loss(*arguments, loss_of, **options)
    else:
        scores = token_logprobs(*arguments, **options)
        loss = loss_of(scores, slice(None))
    return [part.detach() for part in (*scores, *torch.autograd.grad(loss, leaves))]


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
