"""Log-probabilities within kept sets, compared with log-softmax over the tokens of each set in fp64."""

import numpy as np
import pytest
import torch
from plasmid.testing.batches import make_sample
from plasmid.types import Prompt
from plasmid.types.batch import Rows
from plasmid.types.kept_sets import KeptSet
from plasmid_training.batches.collate import collate
from plasmid_training.head.kept_tokens import KeptTokens
from plasmid_training.head.logprobs import token_logprobs
from plasmid_training.head.token_loss import linear_token_loss

from tests.core.training.head_cases import POSITIONS, UP, VOCAB, literally, make_leaves


def case(dtype=torch.float64):
    """Return inputs, and the set of each position as a list; every third set is the whole vocabulary."""
    torch.manual_seed(0)
    leaves = make_leaves(dtype)
    targets = torch.randint(0, VOCAB, (POSITIONS,))
    sets = []
    for i, target in enumerate(targets.tolist()):
        others = torch.randperm(VOCAB)[: int(torch.randint(0, VOCAB, ()))].tolist()
        sets.append([] if i % 3 == 0 else [*dict.fromkeys([*others, target])])
    return leaves, targets, torch.rand(POSITIONS) + 0.5, sets


def tokens_of(sets):
    return KeptTokens.of(KeptSet.of([np.array(s, np.int32) for s in sets], np.zeros(len(sets))))


def loss_of(scores, chunk):
    up = UP.to(scores[0].dtype)[:, chunk][:, : len(scores[0])]
    return (up[0] * scores[0].exp() + up[1] * scores[1]).sum()


def ours(leaves, targets, temperatures, sets, *, fused, **options):
    """Return log-probabilities, entropies, and gradients of `loss_of`."""
    hidden, weight, bias = leaves
    arguments = {"bias": bias, "kept": tokens_of(sets), "entropy_grad": True, **options}
    if fused:
        loss, scores = linear_token_loss(hidden, weight, targets, temperatures, loss_of, **arguments)
    else:
        scores = token_logprobs(hidden, weight, targets, temperatures, **arguments)
        loss = loss_of(scores, slice(None))
    return [*scores[:2], *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 13, "auto"])
def test_values_and_gradients_are_those_of_log_softmax_over_each_set(chunk_size, fused):
    leaves, *rest = case()
    got = ours(leaves, *rest, fused=fused, chunk_size=chunk_size)
    expected = literally(leaves, *rest)[:2]
    expected = [*expected, *torch.autograd.grad(loss_of(expected, slice(None)), leaves)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradients_pass_gradcheck(entropy_grad):
    leaves, targets, temperatures, sets = case()

    def differentiable(hidden, weight, bias):
        options = {"bias": bias, "kept": tokens_of(sets), "entropy_grad": entropy_grad, "chunk_size": 4}
        scores = token_logprobs(hidden, weight, targets, temperatures, **options)
        return tuple(part for part in scores[:2] if part.requires_grad)

    assert torch.autograd.gradcheck(differentiable, leaves, fast_mode=True)


def test_logits_outside_of_the_set_get_no_gradient_at_all():
    (hidden, weight, _), targets, temperatures, _ = case()
    sets = [[int(t), (int(t) + 1) % VOCAB] for t in targets]
    bias = torch.zeros(VOCAB, dtype=torch.float64, requires_grad=True)
    kept = tokens_of(sets[2:3])
    token_logprobs(hidden[2:3], weight, targets[2:3], temperatures[2:3], bias=bias, kept=kept).logprobs.sum().backward()
    assert set(bias.grad.nonzero()[:, 0].tolist()) == set(sets[2])


def test_a_set_of_one_token_is_certain_and_a_set_of_all_is_no_restriction():
    leaves, targets, temperatures, _ = case()
    certain = ours(leaves, targets, temperatures, [[int(t)] for t in targets], fused=False)
    assert torch.equal(certain[0], torch.zeros_like(certain[0]))
    everything = ours(leaves, targets, temperatures, [list(range(VOCAB))] * POSITIONS, fused=False)
    nothing = ours(leaves, targets, temperatures, [[]] * POSITIONS, fused=False)
    for a, b in zip(everything, nothing, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_low_precision_head_rounds_each_kept_gradient_once():
    leaves, *rest = case(torch.bfloat16)
    got = ours(leaves, *rest, fused=False, chunk_size=4)
    logprobs, entropies = literally(leaves, *rest)[:2]
    grads = torch.autograd.grad(loss_of((logprobs, entropies), slice(None)), leaves)
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), logprobs.detach(), rtol=0, atol=0.05)  # of logits in bf16
    for a, b in zip(got[2:], grads, strict=True):
        assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()


@pytest.mark.parametrize("fused", [False, True])
def test_without_any_position_the_gradients_are_zero(fused):
    (hidden, weight, bias), *_ = case()
    none = torch.zeros(0, dtype=torch.int64)
    got = ours((hidden[:0].detach().requires_grad_(), weight, bias), none, torch.zeros(0), [], fused=fused)
    assert len(got[0]) == 0
    assert all(not grad.any() for grad in got[2:])


def rows(*, kept):
    prompt = Prompt(id="p", token_ids=np.array([5, 6], np.int32))
    return Rows.from_samples(
        [
            make_sample(prompt, [7, 8, 9], id="a", rollout_id="a", logprobs=[-1.0, -2.0, -3.0]),
            make_sample(prompt, [7, 8, 9], id="b", rollout_id="b", logprobs=[-1.0, -2.0, -3.0], kept=kept),
        ]
    )


def kept_of(*sets):
    return KeptSet.of([np.array(s, np.int32) for s in sets], [-0.25 if s else 0.0 for s in sets])


def test_a_microbatch_contains_kept_sets_and_their_log_probabilities():
    m = collate(rows(kept=kept_of([1, 7], [], [9])), (1, 0), table_index=(0, 1))
    assert m.kept.offsets.tolist() == [0, 2, 2, 3, 3, 3, 3]
    assert m.kept.token_ids.tolist() == [1, 7, 9]
    assert m.rollout_logprobs.tolist() == [-0.75, -2.0, -2.75, -1.0, -2.0, -3.0]
    assert m.to("meta").kept.token_ids.device.type == "meta"
    everywhere = collate(rows(kept=kept_of([1, 7], [], [9])), (1,), table_index=(0, 1), only_masked=False)
    assert everywhere.kept.offsets.tolist() == [0, 0, 2, 2, 3]
    assert collate(rows(kept=None), (1, 0), table_index=(0, 1)).kept is None


@pytest.mark.parametrize("lost", [[1, 2], [8, 8]])
def test_a_token_that_is_not_once_in_its_own_set_is_refused(lost):
    message = "sample b: token 3 must occur once in its kept set"
    with pytest.raises(ValueError, match=message):
        collate(rows(kept=kept_of([1, 7], lost, [9])), (0, 1), table_index=(0, 1))
