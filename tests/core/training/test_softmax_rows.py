"""Rows of logits, processed in blocks in their own dtype."""

import pytest
import torch
from plasmid_models.kernels import softmax_rows
from plasmid_models.kernels.softmax_rows import EAGER, RowGradients, kernels_for

VOCAB = 2**19


@pytest.fixture
def wide(monkeypatch):
    """Logits, targets and temperatures of three rows, of which two make a block."""
    monkeypatch.setattr(softmax_rows, "BLOCK_ELEMENTS", 2 * VOCAB)
    torch.manual_seed(0)
    return torch.randn(3, VOCAB), torch.tensor([7, VOCAB - 1, 0]), torch.tensor([1.0, 0.5, 2.0])


def test_rows_of_several_blocks_are_those_of_log_softmax(wide):
    logits, targets, temperatures = wide
    stats = EAGER.stats(logits, targets, temperatures, first=0, with_entropy=True)
    exact = (logits / temperatures[:, None]).double().log_softmax(-1)
    chosen = stats.logprobs().double()
    torch.testing.assert_close(chosen, exact[range(3), targets], rtol=0, atol=3e-6)
    torch.testing.assert_close(stats.entropy.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=3e-6)


def test_the_gradient_takes_the_place_of_the_logits(wide):
    logits, targets, temperatures = wide
    stats = EAGER.stats(logits, targets, temperatures, first=0, with_entropy=False)
    up = torch.tensor([1.0, 0.0, -3.0])
    overwritten = logits.clone()
    grad = EAGER.gradient(overwritten, targets, temperatures, RowGradients(stats.tops, stats.sums.log(), up), first=0)
    assert grad.data_ptr() == overwritten.data_ptr()
    exact = -(logits / temperatures[:, None]).softmax(-1)
    exact[range(3), targets] += 1
    exact *= (up / temperatures)[:, None]
    torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-12)
    assert not grad[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_lost_at_the_end_only(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(5, 999) * 3).to(dtype)
    targets, temperatures = torch.randint(0, 999, (5,)), torch.rand(5) + 0.5
    stats = EAGER.stats(logits, targets, temperatures, first=0, with_entropy=True)
    exact = EAGER.stats(logits.double(), targets, temperatures, first=0, with_entropy=True)
    assert {part.dtype for part in stats} == {torch.float32}
    for a, b in zip(stats, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-5)
    upstream = RowGradients(stats.tops, stats.sums.log(), torch.ones(5), stats.entropy, torch.ones(5))
    wide = RowGradients(exact.tops, exact.sums.log(), torch.ones(5), exact.entropy, torch.ones(5))
    expected = EAGER.gradient(logits.double(), targets, temperatures, wide, first=0)
    grad = EAGER.gradient(logits, targets, temperatures, upstream, first=0)
    assert grad.dtype == dtype
    assert (grad.double() - expected).norm() / expected.norm() < torch.finfo(dtype).eps


def test_a_cpu_has_the_plain_kernels():
    assert kernels_for(torch.zeros(3, 2)) is EAGER
