"""KL estimators against their formulas, and against exact sums over a vocabulary."""

import math

import pytest
import torch
from plasmid_training.algorithms.parts.kl import kl_estimate

BY_HAND = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "low_var_kl": lambda d: min(max(math.exp(-d) - 1 + d, -10.0), 10.0),
}


@pytest.mark.parametrize("estimator", BY_HAND)
def test_estimates_are_the_formulas(estimator):
    lp = torch.tensor([-1.0, -2.0, -0.5, -9.0, -0.1], dtype=torch.float64)
    base = torch.tensor([-1.0, -0.5, -3.0, -0.1, -9.0], dtype=torch.float64)
    expected = [BY_HAND[estimator](a - b) for a, b in zip(lp.tolist(), base.tolist(), strict=True)]
    torch.testing.assert_close(kl_estimate(estimator, lp, base).tolist(), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("estimator", BY_HAND)
def test_equal_policies_have_no_kl_and_no_pull(estimator):
    lp = torch.tensor([-1.0, -3.0], requires_grad=True)
    value = kl_estimate(estimator, lp, lp.detach())
    value.sum().backward()
    assert value.tolist() == [0.0, 0.0]
    assert lp.grad.tolist() == ([1.0, 1.0] if estimator == "k1" else [0.0, 0.0])


def distributions():
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(0), torch.randn(6, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_estimates_of_the_kl(estimator):
    _, policy, base = distributions()
    exact = (policy.exp() * (policy - base)).sum()
    average = (policy.detach().exp() * kl_estimate(estimator, policy, base)).sum()
    assert average.item() == pytest.approx(exact.item(), abs=1e-14)


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_gradients_are_those_of_the_kl_on_average(estimator, unbiased):
    """Tokens are sampled from the policy itself: the ratio is 1, but its gradient makes k1 and k3 correct."""
    logits, policy, base = distributions()
    (exact,) = torch.autograd.grad((policy.exp() * (policy - base)).sum(), logits, retain_graph=True)
    ratio = (policy - policy.detach()).exp() if unbiased else None
    average = (policy.detach().exp() * kl_estimate(estimator, policy, base, importance=ratio)).sum()
    (got,) = torch.autograd.grad(average, logits)
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-14)


def test_k1_as_a_loss_has_no_gradient_on_average():
    logits, policy, base = distributions()
    (got,) = torch.autograd.grad((policy.detach().exp() * kl_estimate("k1", policy, base)).sum(), logits)
    assert got.abs().max().item() < 1e-15


def test_importance_is_multiplied_before_the_clamp():
    lp, base = torch.tensor([-1.0]), torch.tensor([-1.0 + 2.0])
    assert kl_estimate("low_var_kl", lp, base, importance=torch.tensor([100.0])).item() == 10.0


@pytest.mark.parametrize("estimator", BY_HAND)
@pytest.mark.parametrize("lp", [-500.0, -1e-3])
def test_very_different_policies_have_finite_gradients(estimator, lp):
    now = torch.tensor([lp], requires_grad=True)
    value = kl_estimate(estimator, now, torch.tensor([-250.0]))
    value.sum().backward()
    assert value.isfinite().all() and now.grad.isfinite().all()


LOG_RATIOS = [x / 4 for x in range(-400, 401)]


def fp64_gradient(estimator, d):
    """Return the derivative with respect to the policy's log-probability; 0 where a clamp applies."""
    if estimator in ("k1", "k2"):
        return 1.0 if estimator == "k1" else d
    bounded = d < -20 or (estimator == "low_var_kl" and math.exp(-d) - 1 + d > 10)
    return 0.0 if bounded else 1 - math.exp(-d)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", BY_HAND)
def test_no_gradient_turns_round_far_from_the_reference(estimator, dtype):
    now = torch.tensor(LOG_RATIOS, dtype=dtype, requires_grad=True)
    value = kl_estimate(estimator, now, torch.zeros_like(now))
    value.sum().backward()
    exact = torch.tensor([fp64_gradient(estimator, d) for d in LOG_RATIOS], dtype=torch.float64)
    torch.testing.assert_close(now.grad.double(), exact, rtol=1e-5, atol=1e-6)
    values = torch.tensor([BY_HAND[estimator](max(d, -20.0) if "k3" in estimator else d) for d in LOG_RATIOS])
    torch.testing.assert_close(value.detach().double(), values.double(), rtol=1e-5, atol=1e-5)
    if estimator != "k1":  # no token is pushed away from the reference
        assert all(gradient * d >= 0 for gradient, d in zip(now.grad.tolist(), LOG_RATIOS, strict=True))
