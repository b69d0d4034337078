"""Batch-invariant operations: identical bits for any other rows, and correct values."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from plasmid_models.kernels.invariant import Spans, attention, linear, product, row_mean
from torch.nn.functional import scaled_dot_product_attention

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth, width", [(64, 128), (72, 50), (576, 1536), (100, 77)])
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype, depth, width):
    x, weight = torch.randn(70, depth).to(dtype), torch.randn(width, depth).to(dtype)
    whole = product(x, weight)
    torch.testing.assert_close(whole, x @ weight.T, rtol=2e-2, atol=1e-1 if dtype == torch.bfloat16 else 1e-4)
    for part in (slice(0, 1), slice(69, 70), slice(3, 40)):
        assert torch.equal(product(x[part], weight), whole[part])
    assert torch.equal(row_mean(x[5:6]), row_mean(x)[5:6])


def test_gradients_are_those_of_pytorch():
    x, weight, bias = (torch.randn(*shape).double().requires_grad_() for shape in ((2, 3, 5), (4, 5), (4,)))
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
    assert torch.autograd.gradcheck(row_mean, (x,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[1], [70], [3, 130, 64]])
def test_attention_of_one_token_has_the_bits_of_the_whole_prompt(dtype, lengths):
    heads, groups, size = 6, 2, 24
    total = sum(lengths)
    query, key, value = (torch.randn(total, n, size).to(dtype) for n in (heads, groups, groups))
    spans = Spans.packed(lengths, torch.device("cpu"))
    whole = attention(query, key.transpose(0, 1)[None], value.transpose(0, 1)[None], spans, scale=0.2)
    # a cache with free space after each row's end, as in an engine
    cache = torch.full((2, len(lengths), groups, max(lengths) + 9, size), torch.nan, dtype=dtype)
    ends = torch.tensor(lengths).cumsum(0)
    for slot, (end, length) in enumerate(zip(ends.tolist(), lengths, strict=True)):
        span = slice(end - length, end)
        for part, packed in zip(cache, (key, value), strict=True):
            part[slot, :, :length] = packed[span].transpose(0, 1)
        q, k, v = (x[span].float().transpose(0, 1)[None] for x in (query, key, value))
        right = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(
            whole[span].float(), right, rtol=1e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5
        )
    last = attention(query[ends - 1], *cache, Spans.last_tokens(torch.tensor(lengths)), scale=0.2)
    assert torch.equal(last, whole[ends - 1])


INTERPRETED = """
import torch
from plasmid_models.kernels import invariant, invariant_triton as kernels
from plasmid_models.kernels.invariant import Spans

def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

for rows, depth, width in ((1, 40, 70), (70, 33, 130)):
    x, weight, bias = torch.randn(rows, depth), torch.randn(width, depth), torch.randn(width)
    close(kernels.matmul(x, weight, bias), invariant.product(x, weight, bias))
    close(kernels.row_mean(x), x.mean(-1))
lengths = [5, 70, 1]
query, key, value = (torch.randn(76, n, s) for n, s in ((4, 24), (2, 24), (2, 10)))
keys, values = (x.transpose(0, 1)[None] for x in (key, value))
spans = Spans.packed(lengths, torch.device("cpu"))
whole = kernels.attention(query, keys, values, spans.table, spans.longest, 0.3)
close(whole, invariant.attention(query, keys, values, spans, scale=0.3))
cache = [torch.full((3, 2, 80, x.shape[-1]), torch.nan) for x in (key, value)]
ends = torch.tensor(lengths).cumsum(0)
for slot, (end, length) in enumerate(zip(ends.tolist(), lengths)):
    for part, packed in zip(cache, (key, value)):
        part[slot, :, :length] = packed[end - length : end].transpose(0, 1)
spans = Spans.last_tokens(torch.tensor(lengths))
last = kernels.attention(query[ends - 1], *cache, spans.table, spans.longest, 0.3)
close(last, whole[ends - 1])
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_triton_kernels_compute_the_same_in_the_interpreter():
    """In a separate process, because Triton decides on import."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
