"""The optimizer starts from the weights of the model folder, not from weights rounded to a 16-bit dtype."""

import asyncio

import numpy as np
import pytest
from megatron_cases import ADAM
from megatron_patches import main_weights

LAYOUTS = {
    "one": (1, {}),
    "one without the distributed optimizer": (1, {"distributed_optimizer": False}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_weights_are_those_of_a_float32_folder(layout, ranks, tiny_qwen):
    from safetensors.numpy import load_file

    num_ranks, trainer = LAYOUTS[layout]

    async def found():
        await ranks.start(num_ranks=num_ranks, trainer=ADAM | trainer | {"dtype": "bfloat16"})
        return [await ranks.processes.run(place, main_weights) for place in range(num_ranks)]

    wanted = {
        number.tobytes() for weight in load_file(tiny_qwen / "model.safetensors").values() for number in weight.flat
    }
    started = np.concatenate(asyncio.run(found()))
    assert len(np.unique(started)) > len(wanted) / 2, "float32 weights hardly ever repeat"
    assert {number.tobytes() for number in started[started != 0]} <= wanted, "0 is what pads the vocabulary"
