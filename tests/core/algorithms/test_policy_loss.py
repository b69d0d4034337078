"""The clipped loss against scalar code, and against vectors of other implementations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plasmid_training.algorithms.grpo import clipped_policy_loss


def by_hand(lp, old, advantage, low, high, dual):
    ratio = math.exp(lp - old)
    plain, bounded = -ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage
    loss = max(plain, bounded)
    if dual is not None and advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss, bounded > plain


def by_hand_gradient(lp, old, advantage, low, high, dual):
    """Return d loss / d lp: -ratio * A, or 0 where a clip applies."""
    ratio = math.exp(lp - old)
    if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low):
        return 0.0
    if dual is not None and advantage < 0 and ratio > dual:
        return 0.0
    return -ratio * advantage


numbers = st.floats(-3, 3, width=32)


@given(
    st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0, 2),
    st.one_of(st.none(), st.floats(1.01, 5)),
)
def test_losses_and_gradients_are_the_formulas(tokens, low, high, dual):
    lp, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    lp.requires_grad_()
    result = clipped_policy_loss(lp, old, advantages, clip_low=low, clip_high=high, dual_clip=dual)
    expected = [by_hand(*token, low, high, dual) for token in tokens]
    torch.testing.assert_close(result.loss.tolist(), [loss for loss, _ in expected], rtol=1e-12, atol=1e-12)
    assert result.clipped.tolist() == [clipped for _, clipped in expected]
    (grad,) = torch.autograd.grad(result.loss.sum(), lp)
    for got, token in zip(grad.tolist(), tokens, strict=True):
        ratio = math.exp(token[0] - token[1])
        if min(abs(ratio - edge) for edge in (1 - low, 1 + high, dual or 0.0)) > 1e-9:
            assert got == pytest.approx(by_hand_gradient(*token, low, high, dual), rel=1e-12, abs=1e-12)


def test_the_gradient_at_a_ratio_of_one_is_that_of_the_policy_gradient():
    lp = torch.tensor([-1.0, -2.0, -0.3], requires_grad=True)
    advantages = torch.tensor([0.5, -1.5, 0.0])
    clipped_policy_loss(lp, lp.detach(), advantages, clip_low=0.2, clip_high=0.2).loss.sum().backward()
    assert torch.equal(lp.grad, -advantages)


def test_dual_clip_caps_the_loss_of_bad_tokens_only():
    ratio = torch.tensor([5.0, 5.0, 1.0])
    advantages = torch.tensor([2.0, -1.0, 1.0])
    result = clipped_policy_loss(ratio.log(), torch.zeros(3), advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(result.loss, torch.tensor([-2.4, 3.0, -1.0]))
    assert result.dual_clipped.tolist() == [False, True, False]
    assert result.clipped.tolist() == [True, False, False]


@pytest.mark.parametrize("difference", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_ratios_that_would_overflow_stay_finite(difference, advantage):
    lp = torch.tensor([difference], requires_grad=True)
    result = clipped_policy_loss(lp, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert result.loss.isfinite().all() and lp.grad.tolist() == [0.0]


def test_a_dual_clip_of_one_or_less_is_refused():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"dual_clip must be more than 1, got 1\.0"):
        clipped_policy_loss(one, one, one, clip_low=0.2, clip_high=0.2, dual_clip=1.0)
