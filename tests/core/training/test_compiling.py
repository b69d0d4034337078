"""Compiled layers are found in the cache of an earlier process, custom autograd functions included."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
import torch
from plasmid_training.batches.prefix_attention import Spread
from plasmid_training.compiling import compile_layers


class Layer(torch.nn.Module):
    def forward(self, x, spread):
        return spread(x.sin()).cos()


layer = Layer()
compile_layers([layer])
x = torch.ones(3, 1, 4, requires_grad=True)
index = np.array([0, 1, 0, 2])
layer.forward(x, Spread.of(index, np.ones(4, np.bool_), 3, "cpu")).sum().backward()
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
