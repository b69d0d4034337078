"""Mixtures of experts, which transformers stores in fused tensors, and attention with heads of different sizes."""

import re

import numpy as np
import pytest
import torch
from hf_cases import generate_all, make_request, plain_logprobs, plain_model, publish, run, started
from megatron_families import folders_of_families, make_family
from plasmid.errors import SyncError
from plasmid_models.lora.insertion import adapter_pieces
from plasmid_models.pieces import Piece
from plasmid_models.sync import checksum, compare
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engine_cases import adapted_layers, drawn
from tests.vision_folders import fuse_tensors

SINGLE_DOWN = re.compile(r"experts\.\d+\.down_proj")
FAMILIES = ["Qwen3-MoE", "GLM-4.5", "DeepSeek-V3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return folders_of_families(tmp_path_factory)


def moved(folder):
    """Return every tensor of the folder by its name there, after random changes."""
    draw = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    return {name: t + 0.05 * torch.randn(t.shape, generator=draw) for name, t in tensors.items()}


def written(source, target, tensors):
    """Write a folder of the model with these tensors."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_of_experts_takes_the_weights_of_single_experts(family, models, tmp_path):
    tensors = moved(models(family))
    new = plain_model(written(models(family), tmp_path / "new", tensors))
    requests = [make_request(i, length=3 + 4 * i, sampling={"temperature": 0.8}) for i in range(4)]

    async def test():
        async with started(models(family), max_batch=3, prefill_tokens=24) as engine:
            old = await generate_all(engine, requests)
            await engine.pause("in_place")
            results = await publish(engine, list(tensors.items()), 1)
            await engine.resume()
            return old, results, await engine.checksum(), await generate_all(engine, requests)

    old, (sent, received), sums, found = run(test())
    compare(sent, received)
    assert received.num_tensors == len(tensors) and any(".experts.3.down_proj" in name for name in tensors)
    assert sums == {name: checksum(tensor) for name, tensor in tensors.items()}
    for model, completions in ((plain_model(models(family)), old), (new, found)):
        for request, completion in zip(requests, completions, strict=True):
            assert len(completion.token_ids) > 0
            np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=2e-5)


def test_experts_of_sizes_that_grouped_products_refuse_are_computed_one_by_one(tmp_path):
    model, requests = make_family(tmp_path / "model", "Qwen3-MoE", moe_intermediate_size=10), [make_request(3)]

    async def test():
        async with started(model) as engine:
            return await generate_all(engine, requests)

    (completion,) = run(test())
    expected = plain_logprobs(plain_model(model), requests[0], completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_the_error_for_an_update_without_an_expert_names_the_expert(models):
    tensors = list(moved(models("Qwen3-MoE")).items())
    lacking = [item for item in tensors if item[0] != "model.layers.1.mlp.experts.2.up_proj.weight"]

    async def test():
        async with started(models("Qwen3-MoE")) as engine:
            await engine.pause("in_place")
            with pytest.raises(
                SyncError, match=r"1 tensors were not sent, .*'model\.layers\.1\.mlp\.experts\.2\.up_proj"
            ):
                await publish(engine, lacking, 1)
            await publish(engine, tensors, 2)
            await engine.resume()
            await engine.health()

    run(test())


def test_a_folder_with_fused_experts_keeps_its_names(models, tmp_path):
    fused = AutoModelForCausalLM.from_pretrained(models("Qwen3-MoE"), dtype=torch.float32).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    folder = written(models("Qwen3-MoE"), tmp_path / "fused", fused)
    tensors = {name: tensor + 0.01 for name, tensor in fused.items()}

    async def test():
        async with started(folder) as engine:
            before = await engine.checksum()
            await engine.pause("in_place")
            compare(*await publish(engine, list(tensors.items()), 1))
            return before, await engine.checksum()

    before, after = run(test())
    assert before == {name: checksum(tensor) for name, tensor in fused.items()}
    assert after == {name: checksum(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("as_parts", ["all of them", "gate and up"])
def test_a_folder_with_fused_experts_takes_single_experts(as_parts, models, tmp_path):
    """As trainer Megatron sends them."""
    state = AutoModelForCausalLM.from_pretrained(models("Qwen3-MoE"), dtype=torch.float32).state_dict()
    folder, sent = written(models("Qwen3-MoE"), tmp_path / "fused", state), moved(models("Qwen3-MoE"))
    fused = fuse_tensors(sent)
    assert fused.keys() == state.keys() and not fused["model.layers.0.mlp.experts.down_proj"].equal(
        state["model.layers.0.mlp.experts.down_proj"]
    )
    if as_parts == "gate and up":
        sent = {name: tensor for name, tensor in sent.items() if not SINGLE_DOWN.search(name)}
        sent |= {name: tensor for name, tensor in fused.items() if name.endswith(".experts.down_proj")}

    async def test():
        async with started(folder) as engine:
            await engine.pause("in_place")
            results = await publish(engine, list(sent.items()), 1)
            compare(*results)
            await engine.resume()
            return results[1], await engine.checksum(), await engine.client.generate(make_request(3))

    received, sums, completion = run(test())
    assert received.num_tensors == len(sent)
    assert sums == {name: checksum(tensor) for name, tensor in fused.items()}
    expected = plain_logprobs(plain_model(written(folder, tmp_path / "new", fused)), make_request(3), completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


LACKING = "1 tensors were not sent, the first is 'model.layers.1.mlp.experts.2.up_proj.weight'"
TWICE = (
    "tensors 'model.layers.1.mlp.experts.down_proj' and 'model.layers.1.mlp.experts.0.down_proj.weight' were both "
    "sent, but one contains the other"
)
SAME = "tensor 'model.layers.1.mlp.experts.2.up_proj.weight' was sent twice"
NO_EXPERTS = "4 tensors were not sent, the first is 'model.layers.0.mlp.experts.gate_up_proj'"


@pytest.mark.parametrize(
    ("kind", "message"), [("lacking", LACKING), ("twice", TWICE), ("same", SAME), ("no experts", NO_EXPERTS)]
)
def test_fused_experts_are_sent_whole_or_as_all_single_experts(kind, message, models, tmp_path):
    state = AutoModelForCausalLM.from_pretrained(models("Qwen3-MoE"), dtype=torch.float32).state_dict()
    folder = written(models("Qwen3-MoE"), tmp_path / "fused", state)
    tensors = moved(models("Qwen3-MoE"))
    single, sent = "model.layers.1.mlp.experts.2.up_proj.weight", list(tensors.items())
    if kind == "lacking":
        sent = [item for item in sent if item[0] != single]
    if kind == "twice":
        name = "model.layers.1.mlp.experts.down_proj"
        sent.append((name, fuse_tensors(tensors)[name]))
    if kind == "same":
        sent.append((single, tensors[single]))
    if kind == "no experts":
        sent = [item for item in sent if ".experts." not in item[0]]

    async def test():
        async with started(folder) as engine:
            await engine.pause("in_place")
            with pytest.raises(SyncError) as raised:
                await publish(engine, sent, 1)
            await publish(engine, list(tensors.items()), 2)
            await engine.resume()
            return str(raised.value)

    assert run(test()) == f"weight sync of version 1: {message}"


def test_single_experts_are_the_base_of_an_adapter(models, tmp_path):
    state = AutoModelForCausalLM.from_pretrained(models("Qwen3-MoE"), dtype=torch.float32).state_dict()
    folder, base = written(models("Qwen3-MoE"), tmp_path / "fused", state), moved(models("Qwen3-MoE"))
    layers = adapted_layers(folder)
    pieces, drawings = adapter_pieces(layers), [drawn(layers, seed) for seed in (0, 1)]
    adapters = [
        {piece.name: piece.of(tensor) for name, tensor in one.items() for piece in pieces.get(name, (Piece(name),))}
        for one in drawings
    ]
    part = "model.layers.0.mlp.experts.0.gate_proj.weight"

    async def test():
        async with started(folder, trainer="adapter-trainer") as engine:
            await engine.pause("in_place")
            await publish(engine, [*base.items(), *adapters[0].items()], 1)
            compare(*await publish(engine, list(adapters[1].items()), 2))
            sums = await engine.checksum()
            with pytest.raises(SyncError, match=f"{len(state) - 1 + 7} tensors were not sent"):
                await publish(engine, [(part, base[part]), *adapters[0].items()], 3)
            return sums

    expected = fuse_tensors(base) | adapters[1]
    assert run(test()) == {name: checksum(tensor) for name, tensor in expected.items()}


def test_corrections_of_experts_arrive_in_float32_where_all_else_is_in_bfloat16(models):
    tensors = moved(models("DeepSeek-V3"))
    tensors = {k: t if k.endswith("e_score_correction_bias") else t.bfloat16() for k, t in tensors.items()}

    async def test():
        async with started(models("DeepSeek-V3"), dtype="bfloat16") as engine:
            await engine.pause("in_place")
            compare(*await publish(engine, list(tensors.items()), 1))
            await engine.resume()
            completion = await engine.client.generate(make_request(3))
            return await engine.checksum(), completion

    sums, completion = run(test())
    assert sums == {name: checksum(tensor) for name, tensor in tensors.items()}
    assert len(completion.token_ids) > 0 and np.isfinite(completion.logprobs).all()


def test_experts_are_sent_to_an_engine_that_has_read_a_config_alone(models, tmp_path):
    """As with a folder in Megatron's distributed format, which does not contain the names that the trainer will
    send."""
    tensors = moved(models("GLM-4.5"))
    folder = written(models("GLM-4.5"), tmp_path / "dist", {})
    (folder / "model.safetensors").unlink()
    for name in (".metadata", "metadata.json"):
        (folder / name).write_text("{}")

    async def test():
        async with started(folder) as engine:
            await engine.pause("in_place")
            compare(*await publish(engine, list(tensors.items()), 0))
            return await engine.checksum()

    assert run(test()) == {name: checksum(tensor) for name, tensor in tensors.items()}
