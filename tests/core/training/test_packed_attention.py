"""Attention within packed samples, compared with plain softmax per sample in fp64, including gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid_training.batches import sink_attention
from plasmid_training.batches.packed_attention import Block, attend, dense_attention, varlen_attention


def plain(query, key, value, lengths, *, scale=None, window=None):
    """Return the output [t, h, e] by loops over samples, with the formula of Vaswani et al. 2017."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    groups, parts = query.shape[1] // key.shape[1], []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (distance < 0) | (distance >= (window or len(q)))
        parts.append(torch.einsum("hts,she->the", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def inputs(lengths, *, heads=4, key_heads=2, size=8, value_size=8, seed=0):
    torch.manual_seed(seed)
    shapes = [(heads, size), (key_heads, size), (key_heads, value_size)]
    return [torch.randn(sum(lengths), *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.sampled_from([None, 1, 3, 50]),
    st.sampled_from([None, 0.3]),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_packed_attention_is_attention_within_each_sample(lengths, window, scale, seed):
    tensors = inputs(lengths, seed=seed)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    ours = attend(*tensors, bounds, max(lengths), scale=scale, window=window)
    exact = plain(*tensors, lengths, scale=scale, window=window)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(exact)
    for a, b in zip(
        torch.autograd.grad(ours, tensors, upstream), torch.autograd.grad(exact, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_values_may_be_wider_or_narrower_than_keys():
    tensors = inputs([3, 5], value_size=6)
    ours = attend(*tensors, torch.tensor([0, 3, 8]).int(), 5)
    torch.testing.assert_close(ours, plain(*tensors, [3, 5]))


def test_contents_of_padding_have_no_effect():
    query, key, value = (x.detach()[None].transpose(1, 2) for x in inputs([6]))
    expected = dense_attention(query, key, value)
    longer = [torch.cat([x, torch.full_like(x[:, :, :3], 1e6)], 2) for x in (query, key, value)]
    torch.testing.assert_close(dense_attention(*longer)[:, :, :6], expected)


@pytest.mark.parametrize("lengths", [(1,), (4, 1, 3), (2, 2)])
def test_a_block_holds_every_token_once_and_starts_of_samples_as_padding(lengths):
    block = Block.of(lengths, "cpu")
    index = block.index.flatten()
    assert index[block.inverse].tolist() == list(range(sum(lengths)))
    rest = set(range(len(index))) - set(block.inverse.tolist())
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    assert all(index[place] == starts[place // max(lengths)] for place in rest)


class PlainKernels:
    """FlashAttention's algorithm (Dao 2023) on packed samples without blocks, with the interface of torch's
    operators."""

    def scores(self, query, key, cu_q, cu_k, scale, left):
        sample_q, sample_k = (
            torch.bucketize(torch.arange(len(x)), cu[1:], right=True) for x, cu in ((query, cu_q), (key, cu_k))
        )
        distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
        mask = (sample_q[:, None] == sample_k) & (distance >= 0) & ((distance <= left) if left >= 0 else True)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return (torch.einsum("thd,shd->hts", query, key) * scale).masked_fill(~mask, -torch.inf)

    def _flash_attention_forward(self, query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
        assert not dropout and not debug and options["window_size_right"] == 0
        scores = self.scores(query, key, cu_q, cu_k, options["scale"], options["window_size_left"])
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        empty = torch.empty(0)
        return torch.einsum("hts,she->the", scores.softmax(-1), value), scores.logsumexp(-1), empty, empty, empty

    def _flash_attention_backward(self, grad, query, key, value, out, lse, cu_q, cu_k, *others, **options):
        groups = query.shape[1] // key.shape[1]
        wide_key, wide_value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = self.scores(query, key, cu_q, cu_k, options["scale"], options["window_size_left"])
        shares = (scores - lse[..., None]).exp()
        sums = (grad * out).sum(-1).T[..., None]
        of_scores = shares * (torch.einsum("the,she->hts", grad, wide_value) - sums) * options["scale"]
        of_key, of_value = torch.einsum("hts,thd->shd", of_scores, query), torch.einsum("hts,the->she", shares, grad)
        of_key, of_value = (x.unflatten(1, (-1, groups)).sum(2) for x in (of_key, of_value))
        return torch.einsum("hts,shd->thd", of_scores, wide_key), of_key, of_value


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_change_the_output_and_gradients_of_packed_kernels_exactly(window, monkeypatch):
    monkeypatch.setattr(sink_attention, "aten", PlainKernels())
    torch.manual_seed(0)
    bounds = torch.tensor([0, 2, 9, 10, 15], dtype=torch.int32)
    query, key, value = (torch.randn(15, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    inputs, options = (query, key, value, sinks), {"scale": 0.4, "window": window, "sinks": sinks}
    found = varlen_attention(query, key, value, (bounds, bounds), (7, 7), **options)
    expected = attend(query, key, value, bounds, 7, **options)  # by a column of the scores
    up = torch.randn_like(found)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(out, inputs, up) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert (found - attend(query, key, value, bounds, 7, scale=0.4, window=window)).abs().max() > 0.01
