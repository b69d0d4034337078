"""The embedded engine computes the same on a GPU as on the CPU."""

import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = str(Path(__file__).parents[1] / "rollout_hf")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

from hf_cases import changed, generate_all, make_request, plain_logprobs, plain_model, publish, run, started  # noqa: E402
from plasmid_models.sync import checksum  # noqa: E402

pytestmark = pytest.mark.gpu


def requests(count=64):
    return [make_request(i, length=4 + i % 9, sampling={"max_new_tokens": 5 + i % 40}) for i in range(count)]


async def complete(path, **options):
    async with started(path, dtype="float32", **options) as engine:
        return await generate_all(engine, requests())


def test_a_gpu_draws_what_the_cpu_draws(tiny_model):
    for cpu, gpu in zip(run(complete(tiny_model)), run(complete(tiny_model, gpu=True)), strict=True):
        assert cpu.token_ids.tolist() == gpu.token_ids.tolist()
        np.testing.assert_allclose(cpu.logprobs, gpu.logprobs, atol=2e-5)


def test_a_row_does_not_depend_on_its_neighbours(tiny_model):
    alone, together = (run(complete(tiny_model, gpu=True, max_batch=size)) for size in (1, 64))
    for one, many in zip(alone, together, strict=True):
        assert one.token_ids.tolist() == many.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, many.logprobs, atol=2e-5)


def test_an_update_makes_the_engine_the_new_model(tiny_model):
    model = plain_model(tiny_model)
    weights = changed(model)

    async def test():
        async with started(tiny_model, gpu=True, dtype="float32") as engine:
            await engine.pause("in_place")
            sent, received = await publish(engine, weights, 1)
            await engine.resume()
            return sent, received, await engine.checksum(), await generate_all(engine, requests(8))

    sent, received, held, completions = run(test())
    assert sent.buckets == received.buckets
    assert held == {name: checksum(tensor.detach()) for name, tensor in weights}
    for request, completion in zip(requests(8), completions, strict=True):
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=2e-5)
