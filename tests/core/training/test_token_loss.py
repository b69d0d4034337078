"""The loss with gradients computed per chunk, compared with the same loss of log-probabilities and autograd."""

import pytest
import torch
from plasmid_training.algorithms.grpo import clipped_policy_loss
from plasmid_training.head.logprobs import TokenScores, token_logprobs
from plasmid_training.head.token_loss import linear_token_loss

POSITIONS, HIDDEN, VOCAB = 13, 6, 17


def case(dtype=torch.float64, positions=POSITIONS):
    torch.manual_seed(0)
    hidden = torch.randn(positions, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, VOCAB, (positions,)), torch.rand(positions) + 0.5


def supervised(scores, chunk):
    return -scores.logprobs.sum() / POSITIONS


GIVEN = torch.randn(3, POSITIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def policy_gradient(scores, chunk):
    old, advantages, weights = GIVEN
    loss = clipped_policy_loss(
        scores.logprobs, old[chunk] - 3, advantages[chunk], clip_low=0.2, clip_high=0.3, dual_clip=3.0
    ).loss
    return ((loss - 0.1 * scores.entropy) * weights[chunk]).sum()


LOSSES = [supervised, policy_gradient]


def apart(loss, inputs):
    """Compute everything at once: log-softmax, loss and gradients by autograd."""
    hidden, weight, bias, targets, temperatures = inputs
    logprobs = ((hidden @ weight.T + bias) / temperatures.to(hidden.dtype)[:, None]).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return loss(TokenScores(logprobs[range(len(targets)), targets], entropy), slice(None))


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 13, 100, "auto"])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_autograd_whatever_the_chunk(loss, chunk_size):
    inputs = case()
    hidden, weight, bias, targets, temperatures = inputs
    got = linear_token_loss(
        hidden, weight, targets, temperatures, loss, bias=bias, entropy_grad=True, chunk_size=chunk_size
    )
    expected = apart(loss, inputs)
    torch.testing.assert_close(got.loss, expected, rtol=0, atol=1e-12)
    ours = torch.autograd.grad(got.loss * 2.5, (hidden, weight, bias))
    theirs = torch.autograd.grad(expected * 2.5, (hidden, weight, bias))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_pass_gradcheck(loss):
    hidden, weight, bias, targets, temperatures = case()

    def differentiable(hidden, weight, bias):
        return linear_token_loss(
            hidden, weight, targets, temperatures, loss, bias=bias, entropy_grad=True, chunk_size=4
        ).loss

    assert torch.autograd.gradcheck(differentiable, (hidden, weight, bias), fast_mode=True)


def test_scores_are_those_of_token_logprobs_and_carry_no_gradient():
    hidden, weight, bias, targets, temperatures = case()
    got = linear_token_loss(hidden, weight, targets, temperatures, supervised, bias=bias, chunk_size=4).scores
    scores = token_logprobs(hidden, weight, targets, temperatures, bias=bias, chunk_size=4)
    assert torch.equal(got.logprobs, scores.logprobs) and torch.equal(got.entropy, scores.entropy)
    assert not got.logprobs.requires_grad and not got.entropy.requires_grad
    none = linear_token_loss(hidden, weight, targets, temperatures, supervised, with_entropy=False)
    assert none.scores.entropy is None


def test_without_entropy_grad_an_entropy_in_the_loss_moves_nothing():
    hidden, weight, bias, targets, temperatures = case()
    got = linear_token_loss(hidden, weight, targets, temperatures, lambda scores, _: scores.entropy.sum(), bias=bias)
    assert got.loss > 0
    got.loss.backward()
    assert not hidden.grad.any() and not weight.grad.any() and not bias.grad.any()


def test_a_low_precision_head_sums_its_gradient_in_fp32():
    hidden, weight, bias, targets, temperatures = case(torch.bfloat16, positions=512)
    loss = linear_token_loss(hidden, weight, targets, temperatures, supervised, bias=bias, chunk_size=8).loss
    ours = torch.autograd.grad(loss * 0.5, (hidden, weight, bias))
    wide = [part.detach().double().requires_grad_() for part in (hidden, weight, bias)]
    exact = torch.autograd.grad(apart(supervised, (*wide, targets, temperatures)) * 0.5, wide)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() / b.norm() < 0.01, "64 chunks must not add up rounding errors of bf16"


def test_a_second_backward_pass_gives_the_same():
    hidden, weight, _, targets, temperatures = case()
    loss = linear_token_loss(hidden, weight, targets, temperatures, supervised, chunk_size=4).loss
    first, second = (torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_to_predict_still_reaches_every_parameter():
    hidden, weight, bias, _, _ = case()
    none = torch.zeros(0, dtype=torch.int64)
    got = linear_token_loss(hidden[none], weight, none, torch.zeros(0), supervised, bias=bias)
    got.loss.backward()
    assert [float(p.grad.abs().sum()) for p in (hidden, weight, bias)] == [0.0, 0.0, 0.0]


def test_frozen_inputs_and_no_grad_need_no_gradient():
    hidden, weight, bias, targets, temperatures = case()
    got = linear_token_loss(hidden, weight.detach(), targets, temperatures, supervised, bias=bias.detach())
    got.loss.backward()
    assert hidden.grad is not None and weight.grad is None and bias.grad is None
    with torch.no_grad():
        quiet = linear_token_loss(hidden, weight, targets, temperatures, supervised, bias=bias)
    assert torch.equal(quiet.loss, got.loss) and not quiet.loss.requires_grad


def test_a_loss_that_is_no_scalar_is_refused():
    hidden, weight, _, targets, temperatures = case()
    with pytest.raises(ValueError, match=r"the loss of a chunk must be a scalar, got shape \(13,\)"):
        linear_token_loss(hidden, weight, targets, temperatures, lambda scores, _: scores.logprobs)
