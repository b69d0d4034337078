"""Chunked log-probabilities, compared with log_softmax in fp64."""

import pytest
import torch
from plasmid_training.head.logprobs import TokenScores, token_logprobs

POSITIONS, HIDDEN, VOCAB = 13, 6, 17


def case(dtype=torch.float64, seed=0, positions=POSITIONS):
    torch.manual_seed(seed)
    hidden = torch.randn(positions, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, VOCAB, (positions,)), torch.rand(positions) + 0.5


def plainly(hidden, weight, bias, targets, temperatures):
    """Return log-probabilities and entropies in fp64, position by position."""
    logits = (hidden.double() @ weight.double().T + bias.double()) / temperatures.double()[:, None]
    rows = [torch.log_softmax(row, 0) for row in logits]
    logprobs = torch.stack([row[target] for row, target in zip(rows, targets, strict=True)])
    return logprobs, torch.stack([-(row.exp() * row).sum() for row in rows])


def logits_logprobs(logits, targets, temperatures, *, with_entropy=True, entropy_grad=False):
    """The same from logits [P, V] by torch's log_softmax."""
    logprobs = (logits / temperatures[:, None].to(logits.dtype)).log_softmax(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    if not with_entropy:
        return TokenScores(chosen, None)
    source = logprobs if entropy_grad else logprobs.detach()
    finite = source.clamp(min=torch.finfo(source.dtype).min)  # for a logit of -inf, 0 * -inf would be NaN
    return TokenScores(chosen, -(source.exp() * finite).sum(-1))


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 13, 100])
def test_values_are_those_of_log_softmax(chunk_size):
    hidden, weight, bias, targets, temperatures = case()
    got = token_logprobs(hidden, weight, targets, temperatures, bias=bias, chunk_size=chunk_size)
    logprobs, entropy = plainly(hidden, weight, bias, targets, temperatures)
    torch.testing.assert_close(got.logprobs, logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.entropy, entropy, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 13])
def test_gradients_pass_gradcheck(chunk_size, entropy_grad):
    hidden, weight, bias, targets, temperatures = case()

    def differentiable(hidden, weight, bias):
        scores = token_logprobs(
            hidden, weight, targets, temperatures, bias=bias, entropy_grad=entropy_grad, chunk_size=chunk_size
        )
        return tuple(part for part in scores[:2] if part.requires_grad)

    assert len(differentiable(hidden, weight, bias)) == 1 + entropy_grad
    assert torch.autograd.gradcheck(differentiable, (hidden, weight, bias), fast_mode=True)


@pytest.mark.parametrize("chunk_size", [1, 3, 13])
def test_gradients_are_those_of_log_softmax_whatever_the_chunk(chunk_size):
    inputs = case()
    up_logprobs, up_entropy = torch.randn(2, POSITIONS, dtype=torch.float64)
    got = token_logprobs(*inputs[:2], *inputs[3:], bias=inputs[2], entropy_grad=True, chunk_size=chunk_size)
    grads = torch.autograd.grad((got.logprobs * up_logprobs + got.entropy * up_entropy).sum(), inputs[:3])
    logprobs, entropy = plainly(*inputs)
    expected = torch.autograd.grad((logprobs * up_logprobs + entropy * up_entropy).sum(), inputs[:3])
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_entropy_has_a_gradient_only_on_request():
    hidden, weight, _, targets, temperatures = case()
    scores = token_logprobs(hidden, weight, targets, temperatures)
    assert scores.logprobs.requires_grad and not scores.entropy.requires_grad
    assert token_logprobs(hidden, weight, targets, temperatures, with_entropy=False).entropy is None


def test_a_low_precision_head_still_has_fp32_scores_and_gradient_sums():
    hidden, weight, bias, targets, temperatures = case(torch.bfloat16, positions=512)
    scores = token_logprobs(hidden, weight, targets, temperatures, bias=bias, chunk_size=8)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, weight, bias).double() / temperatures.double()[:, None]
    expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=2e-5)
    ours = torch.autograd.grad(scores.logprobs.sum(), (hidden, weight))
    assert [g.dtype for g in ours] == [torch.bfloat16] * 2
    exact = torch.autograd.grad(plainly(hidden, weight, bias, targets, temperatures)[0].sum(), weight)[0].double()
    error = (ours[1].double() - exact).norm() / exact.norm()
    assert error < 0.01, "64 chunks must not add up rounding errors of bf16"


def test_nothing_to_predict_still_reaches_every_parameter():
    hidden, weight, bias, _, _ = case()
    none = torch.zeros(0, dtype=torch.int64)
    scores = token_logprobs(hidden[none], weight, none, torch.zeros(0), bias=bias, entropy_grad=True)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert [float(p.grad.abs().sum()) for p in (hidden, weight, bias)] == [0.0, 0.0, 0.0]


def test_frozen_inputs_get_no_gradient():
    hidden, weight, bias, targets, temperatures = case()
    scores = token_logprobs(hidden, weight.detach(), targets, temperatures, bias=bias.detach(), chunk_size=4)
    scores.logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None and bias.grad is None


def test_a_temperature_divides_the_logits_of_its_row_only():
    hidden, weight, _, targets, _ = case()
    one = torch.ones(POSITIONS)
    cold = one.clone()
    cold[3] = 0.25
    plain = token_logprobs(hidden, weight, targets, one).logprobs
    mixed = token_logprobs(hidden, weight, targets, cold).logprobs
    row = torch.log_softmax(hidden[3] @ weight.T * 4, 0)
    assert torch.equal(torch.cat([plain[:3], plain[4:]]), torch.cat([mixed[:3], mixed[4:]]))
    torch.testing.assert_close(mixed[3], row[targets[3]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_logits_give_the_same_as_hidden_states(entropy_grad):
    hidden, weight, bias, targets, temperatures = case()
    a = token_logprobs(hidden, weight, targets, temperatures, bias=bias, entropy_grad=entropy_grad, chunk_size=4)
    b = logits_logprobs(hidden @ weight.T + bias, targets, temperatures, entropy_grad=entropy_grad)
    torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(a.entropy, b.entropy, rtol=0, atol=1e-12)
    assert a.entropy.requires_grad == b.entropy.requires_grad == entropy_grad
    assert logits_logprobs(hidden @ weight.T, targets, temperatures, with_entropy=False).entropy is None


def test_large_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4, float("-inf")]], requires_grad=True)
    scores = logits_logprobs(logits, torch.tensor([2]), torch.ones(1), entropy_grad=True)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert scores.entropy.item() == 0.0 and logits.grad.isfinite().all()
    eye = torch.eye(3)
    fused = token_logprobs(logits.detach()[:, :3] @ eye, eye, torch.tensor([2]), torch.ones(1))
    assert fused.logprobs.item() == -2e4 and fused.entropy.item() == 0.0


def test_a_second_backward_pass_gives_the_same():
    hidden, weight, bias, targets, temperatures = case()
    scores = token_logprobs(hidden, weight, targets, temperatures, bias=bias, entropy_grad=True, chunk_size=4)
    total = scores.logprobs.sum() + scores.entropy.sum()
    first, second = (torch.autograd.grad(total, (hidden, weight, bias), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_logits_of_minus_infinity_have_no_probability_and_no_gradient(entropy_grad):
    hidden, weight, bias, targets, temperatures = case()
    masked = bias.detach().clone()
    masked[5], targets[targets == 5] = float("-inf"), 4
    scores = token_logprobs(hidden, weight, targets, temperatures, bias=masked, entropy_grad=entropy_grad, chunk_size=4)
    grads = torch.autograd.grad(scores.logprobs.sum() + entropy_grad * scores.entropy.sum(), (hidden, weight))
    rest = torch.arange(VOCAB) != 5
    plain = plainly(hidden, weight[rest], bias[rest], targets - (targets > 5).long(), temperatures)
    expected = torch.autograd.grad(plain[0].sum() + entropy_grad * plain[1].sum(), (hidden, weight))
    for a, b in zip((*scores[:2], *grads), (*plain[:2], *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_no_chunk_size_below_one():
    hidden, weight, _, targets, temperatures = case()
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        token_logprobs(hidden, weight, targets, temperatures, chunk_size=0)
