"""The Triton kernels on a GPU, compared with plain torch, and the memory of the fused functions."""

import numpy as np
import pytest
import torch
from plasmid.types.kept_sets import KeptSet
from plasmid_models.kernels.softmax_rows import EAGER, RowGradients, kernels_for
from plasmid_training.head.kept_tokens import KeptTokens
from plasmid_training.head.logprobs import token_logprobs
from plasmid_training.head.token_loss import linear_token_loss

pytestmark = pytest.mark.gpu


def rows(dtype, width, count=37):
    generator = torch.Generator("cuda").manual_seed(width)
    logits = torch.randn(count, width, device="cuda", generator=generator) * 4
    targets = torch.randint(0, width + 5, (count,), device="cuda", generator=generator)
    return logits.to(dtype), targets, torch.rand(count, device="cuda", generator=generator) + 0.5


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("width", [17, 4096, 50257, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_triton_statistics_and_gradients_are_those_of_fp64(dtype, width, first):
    logits, targets, temperatures = rows(dtype, width)
    triton = kernels_for(logits)
    assert triton is not EAGER
    exact = EAGER.stats(logits.double(), targets, temperatures, first=first, with_entropy=True)
    stats = triton.stats(logits, targets, temperatures, first=first, with_entropy=True)
    for a, b in zip(stats, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    without = triton.stats(logits, targets, temperatures, first=first, with_entropy=False)
    assert without.entropy is None and torch.equal(without.tops, stats.tops) and torch.equal(without.sums, stats.sums)
    up = torch.randn(2, len(logits), device="cuda")
    for entropies in ((None, None), (exact.entropy, up[1])):
        upstream = RowGradients(exact.tops, exact.sums.log(), up[0], *entropies)
        expected = EAGER.gradient(logits.double(), targets, temperatures, upstream, first=first)
        low = RowGradients(*(None if part is None else part.float() for part in upstream))
        grad = triton.gradient(logits.clone(), targets, temperatures, low, first=first)
        error = (grad.double() - expected).norm() / expected.norm()
        assert error < max(torch.finfo(dtype).eps, 3e-6)


def test_triton_keeps_nan_and_infinite_logits():
    logits = torch.tensor([[1e4, 0.0, -1e4, float("-inf")], [float("nan"), 0.0, 1.0, 2.0]], device="cuda")
    targets, ones = torch.tensor([2, 1], device="cuda"), torch.ones(2, device="cuda")
    stats = kernels_for(logits).stats(logits, targets, ones, first=0, with_entropy=True)
    assert stats.logprobs()[0] == -2e4 and stats.entropy[0] == 0
    assert stats.logprobs()[1].isnan() and stats.entropy[1].isnan()
    upstream = RowGradients(stats.tops, stats.sums.log(), ones, stats.entropy, ones)
    grad = kernels_for(logits).gradient(logits, targets, ones, upstream, first=0)
    assert grad[0].tolist() == [-1.0, 0.0, 1.0, 0.0] and grad[1].isnan().all()


def head(dtype, positions=700, hidden=64, vocab=50000):
    torch.manual_seed(0)
    inputs = torch.randn(positions, hidden, device="cuda"), torch.randn(vocab, hidden, device="cuda") / hidden**0.5
    targets = torch.randint(0, vocab, (positions,), device="cuda")
    leaves = [part.to(dtype).requires_grad_() for part in inputs]
    return *leaves, targets, torch.rand(positions, device="cuda") + 0.5


def kept_sets(targets, vocab):
    """Return up to 200 tokens around each target, and the whole vocabulary at every third position."""
    random = np.random.default_rng(0)
    sizes = [0 if i % 3 == 0 else int(random.integers(1, 200)) for i in range(len(targets))]
    sets = [(int(t) + np.arange(size, dtype=np.int32)) % vocab for t, size in zip(targets, sizes, strict=True)]
    return KeptTokens.of(KeptSet.of(sets, np.zeros(len(sets)))).to("cuda")


def loss_of(scores, chunk):
    weight = torch.linspace(-1, 1, 700, device="cuda", dtype=scores.logprobs.dtype)[chunk]
    return (weight * scores.logprobs.exp()).sum() + 0.01 * scores.entropy.sum()


# tolerance for bf16 logits: with plain torch, the weight gradient of this loss is 2.2% off
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2.5e-2), (torch.float32, 2e-5)])
@pytest.mark.parametrize("restricted", [False, True])
def test_gradients_of_both_functions_are_those_of_fp64(dtype, tolerance, restricted):
    hidden, weight, *rest = head(dtype)
    kept = kept_sets(rest[0], len(weight)) if restricted else None
    wide = [part.detach().double().requires_grad_() for part in (hidden, weight)]
    exact = token_logprobs(*wide, *rest, kept=kept, entropy_grad=True)
    expected = torch.autograd.grad(loss_of(exact, slice(None)), wide)
    scores = token_logprobs(hidden, weight, *rest, kept=kept, entropy_grad=True, chunk_size=256)
    apart = torch.autograd.grad(loss_of(scores, slice(None)), (hidden, weight))
    fused = linear_token_loss(hidden, weight, *rest, loss_of, kept=kept, entropy_grad=True, chunk_size=256)
    for grads in (apart, torch.autograd.grad(fused.loss, (hidden, weight))):
        for a, b in zip(grads, expected, strict=True):
            assert a.dtype == dtype and (a.double() - b).norm() / b.norm() < tolerance


@pytest.mark.parametrize("restricted", [False, True])
def test_two_runs_are_equal_bit_by_bit(restricted):
    hidden, weight, *rest = head(torch.bfloat16)
    kept = kept_sets(rest[0], len(weight)) if restricted else None

    def run():
        scores = token_logprobs(hidden, weight, *rest, kept=kept, entropy_grad=True, chunk_size=256)
        return *scores[:2], *torch.autograd.grad(loss_of(scores, slice(None)), (hidden, weight))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_no_logits_of_more_than_a_chunk_are_ever_held():
    hidden, weight, *rest = head(torch.bfloat16, positions=8192)
    logits = 8192 * len(weight) * 2
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_logprobs(hidden, weight, *rest, chunk_size=1024).logprobs.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < logits / 8 + 4 * 4 * weight.numel() + 2**24
