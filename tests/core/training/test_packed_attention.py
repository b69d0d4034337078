"""Attention within packed samples against plain softmax over each sample, in fp64, gradients included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid_training.batches.packed_attention import Block, attend, dense_attention


def plain(query, key, value, lengths, *, scale=None, window=None):
    """[t, h, e] by loops over samples and the formula of Vaswani et al. 2017."""
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


def test_what_padding_holds_changes_nothing():
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
