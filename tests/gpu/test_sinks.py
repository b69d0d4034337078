"""Packed attention with sinks on a GPU, compared with dense attention in fp32."""

import pytest
import torch
from plasmid_training.batches.packed_attention import attend

pytestmark = pytest.mark.gpu
LENGTHS = (5, 33, 1, 100, 25)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (8, 2), (64, 8)])
def test_output_and_gradients_are_those_of_dense_attention(heads, key_heads, window):
    torch.manual_seed(0)
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    sizes = ((heads, 64), (key_heads, 64), (key_heads, 64))
    packed = [torch.randn(sum(LENGTHS), *size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    packed.append(torch.randn(heads, device="cuda", dtype=torch.bfloat16))
    up = torch.randn(sum(LENGTHS), heads, 64, device="cuda", dtype=torch.bfloat16)

    def outcome(dtype):
        query, key, value, sinks = inputs = [x.to(dtype).requires_grad_() for x in packed]
        out = attend(query, key, value, bounds, max(LENGTHS), scale=0.125, window=window, sinks=sinks)
        return out, *torch.autograd.grad(out, inputs, up.to(dtype))

    for ours, theirs in zip(outcome(torch.bfloat16), outcome(torch.float32), strict=True):
        assert (ours.float() - theirs).norm() < 0.02 * theirs.norm()
