"""Compiled layers: the cache of an earlier process, inputs of their graphs, and the memory budget."""

import os
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
from plasmid_models.lora.layers import LoRALinear
from plasmid_training.compiling import compile_layers, count_graphs
from torch import nn

PROGRAM = """
import numpy as np
import torch
from plasmid_training.batches.prefix_attention import TokenGather
from plasmid_training.compiling import compile_layers


class Layer(torch.nn.Module):
    def forward(self, x, spread):
        return spread(x.sin()).cos()


layer = Layer()
compile_layers([layer], memory_budget=1.0)
x = torch.ones(3, 1, 4, requires_grad=True)
index = np.array([0, 1, 0, 2])
layer.forward(x, TokenGather.of(index, np.ones(4, np.bool_), 3, "cpu")).sum().backward()
counters = torch._dynamo.utils.counters["aot_autograd"]
print(counters["autograd_cache_hit"], counters["autograd_cache_saved"], x.grad.flatten().tolist())
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_second_process_finds_compiled_layers_in_the_cache(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def compile_in_process():
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        hits, saved, gradient = done.stdout.split(" ", 2)
        return int(hits), int(saved), gradient

    first, second = compile_in_process(), compile_in_process()
    assert first[:2] == (0, 1) and second[:2] == (1, 0)
    assert first[2] == second[2]


def test_scales_and_epsilons_are_constants_of_one_graph(monkeypatch):
    """As inputs, they make TorchDynamo trace a layer twice, and no cache has the first of the two graphs."""
    inputs = []

    def record(graph, example):
        inputs.append([x for x in example if isinstance(x, torch.Tensor) and x.dtype == torch.float64])
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    monkeypatch.setattr(torch._dynamo.config, "specialize_float", False)
    torch._dynamo.reset()
    layers = [nn.Sequential(LoRALinear(nn.Linear(4, 4), rank=2, scale=0.7, dtype=torch.float32)) for _ in range(3)]
    compile_layers(layers, memory_budget=1.0)
    for tokens in (5, 7):
        for layer in layers:
            nn.init.ones_(layer[0].lora_A)
            nn.init.ones_(layer[0].lora_B)
            x = torch.ones(tokens, 4)
            expected = nn.functional.linear(x, layer[0].weight, layer[0].bias) + 0.7 * 2 * 4
            assert torch.allclose(layer.forward(x), expected)
    assert inputs == [[]]


class Block(nn.Module):
    """A gated MLP with a norm before it."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.RMSNorm(16),
            nn.Linear(16, 64),
            nn.Linear(16, 64),
            nn.Linear(64, 16),
        )

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def test_passes_without_gradient_use_the_training_graph_and_keep_nothing(monkeypatch):
    """FSDP2 turns the hidden states of training into views, and the embeddings of Megatron are views."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block, kept = Block(), []
    compile_layers([block], memory_budget=1.0)
    x = torch.arange(64.0).view(4, 16)

    def score():
        with torch.no_grad():
            return block.forward(x)

    for changed in (lambda x: x.view_as(x), lambda x: x.view(16, 4).view(4, 16), lambda x: x):
        leaf = x.clone().requires_grad_()
        trained = block.forward(changed(leaf * 1))
        assert torch.equal(score(), trained) and not score().requires_grad
        (gradient,) = torch.autograd.grad(trained.square().sum(), leaf)
        (expected,) = torch.autograd.grad(Block.forward(block, leaf).square().sum(), leaf)
        assert torch.allclose(gradient, expected)
    assert count_graphs() == {"train/graphs": 1}
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(weakref.ref(y)), lambda y: y):
        score()
    weights = {id(parameter) for parameter in block.parameters()}
    assert kept and all(y() is None or id(y()) in weights for y in kept)


def test_frozen_layers_are_compiled_without_gradient(monkeypatch):
    """Their graph takes less time to compile, and weights without gradients need a separate graph anyway."""
    modes = []

    def record(graph, _):
        modes.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    torch._dynamo.reset()
    for block in (Block().requires_grad_(False), Block()):
        compile_layers([block], memory_budget=1.0)
        with torch.no_grad():
            block.forward(torch.ones(4, 16))
    assert modes == [False, True]


def test_a_smaller_budget_keeps_less_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))

    def train(budget, tokens=32):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block, kept = Block(), {}
        compile_layers([block], memory_budget=budget)

        def pack(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = block.forward(torch.ones(tokens, 16).cumsum(0)).square().sum()
        loss.backward()
        weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        return block.gate.weight.grad, sum(size for at, size in kept.items() if at not in weights)

    gradients, bytes_kept = zip(*map(train, (1.0, 0.5, 0.0)), strict=True)
    assert all(torch.allclose(gradient, gradients[0], rtol=1e-6) for gradient in gradients)
    assert bytes_kept[0] > 1.5 * bytes_kept[1] > 1.5 * bytes_kept[2]


def test_norms_are_fused_for_any_number_of_tokens():
    """Otherwise microbatches of few tokens would need a second training graph."""
    triton = torch._inductor.config.triton
    if not hasattr(triton, "mix_order_reduction_non_strict_mode"):
        pytest.skip("this release has no limit")
    triton.mix_order_reduction_non_strict_mode = False
    compile_layers([], memory_budget=1.0)
    assert triton.mix_order_reduction_non_strict_mode
