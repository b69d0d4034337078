"""Grouped matrix products over experts on a GPU compute the same as one expert after another, also for unused experts.

Only one layer: rounding in bfloat16 would change the choices of a second layer's router.
"""

import pytest
import torch
from plasmid_models.testing import make_tiny_model
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.gpu
SIZES = {"num_layers": 1, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "hidden_size": 128}


def gradients(model, implementation, dtype, tokens):
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, experts_implementation=implementation).cuda()
    lm(tokens, labels=tokens).loss.backward()
    return {name: parameter.grad.float() for name, parameter in lm.named_parameters()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("length", [5, 200])
def test_gradients_of_transformers_experts(length, dtype, tolerance, tmp_path):
    """With five tokens and four experts each, at least 44 of 64 experts have no tokens."""
    model = make_tiny_model(tmp_path / "model", family="qwen3_moe", **SIZES)
    tokens = torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(0)).cuda()
    loop, grouped = (gradients(model, name, dtype, tokens) for name in ("eager", "grouped_mm"))
    for name, expected in loop.items():
        assert (grouped[name] - expected).norm() <= tolerance * expected.norm() + 1e-7, name
        if "experts" in name:
            assert bool((grouped[name][expected.abs().amax((1, 2)) == 0] == 0).all()), "experts without tokens"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_gradients_of_megatrons_experts(dtype, tolerance):
    from plasmid_megatron.model.experts import _GroupedLinear

    draw = torch.Generator("cuda").manual_seed(0)
    counts = [7, 0, 0, 300, 1, 0, 12, 0]

    def tensor(*shape):
        return torch.randn(shape, device="cuda", dtype=dtype, generator=draw).requires_grad_()

    x, weights = tensor(sum(counts), 128), [tensor(96, 128) for _ in counts]
    bounds = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    grouped = _GroupedLinear.apply(x, bounds, *weights)
    loop = torch.cat([part @ weight.T for part, weight in zip(x.split(counts), weights, strict=True)])
    upstream = torch.randn_like(loop)
    found = [torch.autograd.grad(out, [x, *weights], upstream) for out in (grouped, loop)]
    for ours, theirs in zip((grouped, *found[0]), (loop, *found[1]), strict=True):
        assert (ours - theirs).float().norm() <= tolerance * theirs.float().norm()
