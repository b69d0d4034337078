"""Folders with a vision model around the text model: only the text model is trained, and exports are complete."""

import asyncio

import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch
from megatron_cases import FSDP_ADAM, assert_alike, outcome_of, plain_outcome
from megatron_families import assert_identical, in_bfloat16_with_a_draft_layer, make_family
from plasmid_fsdp.model.building import build_on_meta
from plasmid_fsdp.settings import FSDP
from plasmid_hf.model.language_model import load_model
from plasmid_models.source import Source
from safetensors.torch import load_file

from tests.vision_folders import NAMES, full_model, fuse_experts, make_vision_folder, others_of, text_of, vision_folders

BATCH = make_batch(num_groups=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return vision_folders(tmp_path_factory)


@pytest.mark.parametrize("name", NAMES)
def test_the_text_model_computes_what_the_full_model_computes(name, models):
    source, ids = Source(where="model", path=models(name), trust_remote_code=False), torch.arange(40)[None] % 57
    full = full_model(models(name), torch.float64)
    engine = load_model(source.path, dtype=torch.float64, device=torch.device("cpu"), trust_remote_code=False)
    trainer = build_on_meta(source, FSDP(dtype="float32", attention="sdpa"))
    assert type(engine.hf) is type(trainer) and not any("vis" in name for name in trainer.state_dict())
    for lm in (engine.hf, full):
        lm.set_attn_implementation("eager")
    with torch.no_grad():
        difference = engine.hf(input_ids=ids).logits - full(input_ids=ids).logits
    assert difference.abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMES)
def test_training_the_text_model_matches_transformers(kind, name, models, request, tmp_path):
    expected = plain_outcome(models(name), tmp_path / "plain", batch=BATCH)
    ranks = request.getfixturevalue(kind)
    before = load_file(models(name) / "model.safetensors")

    async def run():
        trainer, config = await ranks.start(model=models(name), trainer=FSDP_ADAM)
        await trainer.export(tmp_path / "same")
        return await outcome_of(trainer, config, tmp_path / "out", batch=BATCH)

    found = asyncio.run(run())
    assert_identical(load_file(tmp_path / "same/model.safetensors"), before)
    assert_identical(others_of(found.weights), others_of(before))
    assert others_of(before) and largest_difference(text_of(found.weights), text_of(before)) > 1e-3
    found.weights, expected.weights = text_of(found.weights), text_of(expected.weights)
    assert_alike(found, expected, 2e-5)  # rounding within the chunks of linear attention


def test_experts_in_one_tensor_stay_there(one_rank, tmp_path):
    model = fuse_experts(make_vision_folder(tmp_path / "model", "qwen3_5_moe"))

    async def run():
        trainer, _ = await one_rank.start(model=model, trainer=FSDP_ADAM)
        await trainer.export(tmp_path / "same")

    asyncio.run(run())
    assert_identical(*(load_file(folder / "model.safetensors") for folder in (tmp_path / "same", model)))


def test_a_critic_starts_from_the_text_model(one_rank, models, tmp_path):
    trainer = FSDP_ADAM | {"critic": {"export": True}}

    async def run():
        ranks, config = await one_rank.start(model=models("gemma3"), trainer=trainer, algorithm={"kind": "ppo"})
        await fit(ranks, config, make_batch())
        await ranks.export(tmp_path / "out")

    asyncio.run(run())
    critic = tmp_path / "out-critic"
    before, after = (load_file(folder / "model.safetensors") for folder in (models("gemma3"), critic))
    assert after.keys() == before.keys() | {"score.weight", "score.bias"}
    again = {"model": str(models("gemma3"))}
    asyncio.run(one_rank.start(**again, algorithm={"kind": "ppo"}, critic={"path": str(critic)}))


def test_layers_that_predict_further_tokens_go_along(one_rank, tmp_path):
    model = in_bfloat16_with_a_draft_layer(make_family(tmp_path / "model", "GLM-4.5"))

    async def run():
        trainer, _ = await one_rank.start(model=model, trainer=FSDP_ADAM)
        await trainer.export(tmp_path / "same")

    asyncio.run(run())
    assert_identical(*(load_file(folder / "model.safetensors") for folder in (tmp_path / "same", model)))
