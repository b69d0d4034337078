"""Servers of folders with a vision model: weights sent under the folder's names become the new text model."""

import asyncio

import numpy as np
import pytest
import torch
from plasmid_models.sync import compare
from safetensors.torch import load_file, save_file
from sgl_cases import make_request, plain_logprobs, publish, started

from tests.vision_folders import full_model, make_vision_folder, text_of

pytestmark = pytest.mark.long


def moved(path):
    """Return the folder's text model with slightly changed weights, and transformers' model of it."""
    draw, tensors = torch.Generator().manual_seed(3), load_file(path / "model.safetensors")
    new = {name: t + 0.01 * torch.randn(t.shape, generator=draw) for name, t in text_of(tensors).items()}
    save_file(tensors | new, path / "model.safetensors", metadata={"format": "pt"})
    return new, full_model(path)


def test_a_server_becomes_the_new_text_model(sglang, tmp_path):
    path, request = make_vision_folder(tmp_path / "model", "gemma3"), make_request(3, num=12)

    async def test():
        async with started(path, tmp_path, read_back_every=1) as engine:
            first = await engine.client.generate(request)
            expected = [plain_logprobs(full_model(path), request, first)]
            weights, lm = moved(path)
            await engine.pause(engine.pause_mode)
            compare(*await publish(engine, list(weights.items()), 1))
            await engine.resume()
            second = await engine.client.generate(request)
            return [first, second], [*expected, plain_logprobs(lm, request, second)]

    for found, expected in zip(*asyncio.run(test()), strict=True):
        np.testing.assert_allclose(found.logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_every_weight_of_the_text_model_is_read_back(name, sglang, tmp_path):
    """SGLang has no CPU kernels for linear attention, so nothing is sampled."""
    path = make_vision_folder(tmp_path / "model", name)

    async def test():
        async with started(path, tmp_path, read_back_every=1) as engine:
            before = await engine.checksum()
            await engine.pause(engine.pause_mode)
            compare(*await publish(engine, list(moved(path)[0].items()), 1))
            return before, await engine.checksum()

    before, after = asyncio.run(test())
    same = {name for name in before if before[name] == after[name]}
    assert same == {name for name in before if "visual." in name}
