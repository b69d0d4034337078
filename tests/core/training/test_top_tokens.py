"""Log-probabilities of top tokens, compared with log-softmax in fp64, and their transport from a teacher to the
loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from plasmid.testing.batches import make_sample
from plasmid.types import Prompt
from plasmid.types.batch import Rows
from plasmid.types.kept_sets import KeptSet
from plasmid.types.top_tokens import TopChoice, TopTokens
from plasmid_training.batches.collate import collate
from plasmid_training.batches.scores import join_scores, split_scores
from plasmid_training.head.kept_tokens import KeptTokens
from plasmid_training.head.logprobs import token_logprobs
from plasmid_training.head.token_loss import linear_token_loss

from tests.core.training.head_cases import POSITIONS, UP, VOCAB, literally, make_leaves

COUNT = 5
UP_TOP = torch.randn(POSITIONS, COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def case(dtype=torch.float64):
    """Return inputs, kept sets of every other position, and top tokens, which include the target at every third
    position."""
    torch.manual_seed(0)
    leaves = make_leaves(dtype)
    targets = torch.randint(0, VOCAB, (POSITIONS,))
    others = torch.stack([1 + torch.randperm(VOCAB - 1)[:COUNT] for _ in range(POSITIONS)])
    top_ids = (targets[:, None] + others) % VOCAB
    top_ids[::3, 2] = targets[::3]
    sets = [sorted({int(t), 3, 4}) if i % 2 else [] for i, t in enumerate(targets.tolist())]
    return leaves, targets, torch.rand(POSITIONS) + 0.5, top_ids, sets


def expect(leaves, targets, temperatures, top_ids, sets):
    """The same as `literally`, with the log-probabilities of the top tokens."""
    logprobs, entropies, every = literally(leaves, targets, temperatures, sets)
    return logprobs, entropies, every.gather(1, top_ids)


def loss_of(scores, chunk, entropy_grad=True):
    logprobs, entropy, top, *_ = scores
    up, up_top = UP.to(logprobs.dtype)[:, chunk], UP_TOP.to(top.dtype)[chunk]
    loss = (up[0, : len(logprobs)] * logprobs.exp()).sum() + (up_top[: len(top)] * top.exp()).sum()
    return loss + (up[1, : len(entropy)] * entropy).sum() if entropy_grad else loss


def ours(leaves, targets, temperatures, top_ids, sets, *, fused, entropy_grad=True, **options):
    hidden, weight, bias = leaves
    kept = KeptTokens.of(KeptSet.of([np.array(s, np.int32) for s in sets], np.zeros(len(sets))))
    arguments = {"bias": bias, "kept": kept, "top_ids": top_ids.int(), "entropy_grad": entropy_grad, **options}

    def loss(scores, chunk):
        return loss_of(scores, chunk, entropy_grad)

    if fused:
        value, scores = linear_token_loss(hidden, weight, targets, temperatures, loss, **arguments)
    else:
        scores = token_logprobs(hidden, weight, targets, temperatures, **arguments)
        value = loss(scores, slice(None))
    return [*scores[:3], *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 13, "auto"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_log_softmax(chunk_size, fused, entropy_grad, dtype, tolerance):
    leaves, *rest = case(dtype)
    got = ours(leaves, *rest, fused=fused, entropy_grad=entropy_grad, chunk_size=chunk_size)
    expected = expect(leaves, *rest)
    expected = [*expected, *torch.autograd.grad(loss_of(expected, slice(None), entropy_grad), leaves)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance)


def test_gradients_pass_gradcheck():
    leaves, targets, temperatures, top_ids, _ = case()

    def differentiable(hidden, weight, bias):
        return token_logprobs(hidden, weight, targets, temperatures, bias=bias, top_ids=top_ids, chunk_size=4)[2]

    assert torch.autograd.gradcheck(differentiable, leaves, fast_mode=True)


def test_a_low_precision_head_rounds_each_gradient_once():
    leaves, *rest = case(torch.bfloat16)
    got = ours(leaves, *rest, fused=False, chunk_size=4)
    expected = expect(leaves, *rest)
    grads = torch.autograd.grad(loss_of(expected, slice(None)), leaves)
    assert got[2].dtype == torch.float32
    torch.testing.assert_close(got[2].double(), expected[2].detach(), rtol=0, atol=0.1)  # of logits in bf16
    for a, b in zip(got[3:], grads, strict=True):
        assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()


@pytest.mark.parametrize("fused", [False, True])
def test_without_any_position_the_gradients_are_zero(fused):
    (hidden, weight, bias), *_ = case()
    none, no_top = torch.zeros(0, dtype=torch.int64), torch.zeros(0, COUNT, dtype=torch.int64)
    leaves = (hidden[:0].detach().requires_grad_(), weight, bias)
    got = ours(leaves, none, torch.zeros(0), no_top, [], fused=fused)
    assert got[2].shape == (0, COUNT)
    assert all(not grad.any() for grad in got[3:])


@pytest.mark.parametrize("num_tokens", [VOCAB, 9])
def test_the_most_likely_tokens_of_the_policys_vocabulary_are_chosen(num_tokens):
    (hidden, weight, bias), targets, temperatures, *_ = case()
    choice = TopChoice(count=COUNT, num_tokens=num_tokens)
    found = token_logprobs(hidden, weight, targets, temperatures, bias=bias, top=choice, chunk_size=4)
    every = ((hidden @ weight.T + bias) / temperatures[:, None]).log_softmax(1)
    expected = every[:, :num_tokens].topk(COUNT, dim=1)
    assert torch.equal(found.top_ids, expected.indices)
    torch.testing.assert_close(found.top_logprobs, expected.values, rtol=0, atol=1e-12)
    assert not found.top_logprobs.requires_grad and not found.top_ids.requires_grad and found.logprobs.requires_grad


def top_of(count, start=0):
    ids = np.arange(start, start + 2 * count, dtype=np.int32).reshape(count, 2)
    return TopTokens(token_ids=ids, logprobs=-ids.astype(np.float32))


def rows():
    """Create two samples of 2 and 3 loss tokens, the second with a token outside of the loss in between."""
    prompt = Prompt(id="p", token_ids=np.array([5, 6], np.int32))
    samples = [
        replace(make_sample(prompt, [7, 8], id="a", rollout_id="a"), teacher_top=top_of(2)),
        make_sample(prompt, [7, 1, 8, 9], id="b", rollout_id="b"),
    ]
    mask = samples[1].loss_mask.copy()
    mask[3] = False
    samples[1] = replace(samples[1], loss_mask=mask, teacher_top=top_of(3, 40))
    return Rows.from_samples(samples)


def test_a_microbatch_carries_the_top_tokens_of_its_loss_tokens():
    m = collate(rows(), (1, 0), table_index=(0, 1))
    assert m.targets.tolist() == [7, 8, 9, 7, 8]
    assert m.teacher_top_ids.tolist() == [[40, 41], [42, 43], [44, 45], [0, 1], [2, 3]]
    assert m.teacher_top_logprobs.tolist() == [[-40, -41], [-42, -43], [-44, -45], [0, -1], [-2, -3]]
    assert (m.teacher_top_ids.dtype, m.teacher_top_logprobs.dtype) == (torch.int32, torch.float32)
    assert m.to("meta").teacher_top_ids.device.type == "meta"
    assert collate(rows(), (1, 0), table_index=(0, 1), only_masked=False).teacher_top_ids is None


def test_rows_keep_the_top_tokens_of_selected_samples():
    picked = rows().select([1])
    assert picked.teacher_top.token_ids.tolist() == [[40, 41], [42, 43], [44, 45]]
    both = Rows.concat([picked, replace(rows().select([0]), teacher_top=None)])
    assert both.teacher_top.token_ids.tolist()[:3] == picked.teacher_top.token_ids.tolist()
    assert np.isnan(both.teacher_top.logprobs[3:]).all() and both.teacher_top.num_positions == 5
    assert Rows.concat([replace(rows(), teacher_top=None)]).teacher_top is None


def test_scores_are_split_by_sample_and_joined_again():
    whole = rows()
    parts = split_scores(whole.teacher_top, whole)
    assert [part.num_positions for part in parts] == [2, 3]
    joined = join_scores(parts, device=torch.device("cpu"))
    assert np.array_equal(joined.token_ids, whole.teacher_top.token_ids)
    assert split_scores(TopTokens.unknown(0, 2), Rows.empty()) == ()


def test_top_tokens_need_one_position_per_loss_token():
    sample = make_sample(Prompt(id="p", token_ids=np.array([5], np.int32)), [7, 8], id="a", rollout_id="a")
    with pytest.raises(ValueError, match="teacher_top must have a position for each of 2 loss tokens, got 3"):
        replace(sample, teacher_top=top_of(3))
    with pytest.raises(ValueError, match=r"must have ids and log-probabilities of one shape \[n, K\]"):
        TopTokens(token_ids=np.zeros((2, 3), np.int32), logprobs=np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match=r"must have the same number of top tokens per position, got \[2, 3\]"):
        TopTokens.concat([top_of(1), TopTokens.unknown(1, 3)])
