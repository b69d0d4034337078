"""Trainer 'megatron' on folders with a vision model around the text model, and conversion of its checkpoints."""

import asyncio
import json

import numpy as np
import pytest
from fsdp_cases import fit, whole_rows
from megatron_cases import ADAM, assert_alike, make_batch, outcome, plain_outcome, small_batch
from megatron_families import assert_identical, network_logits
from plasmid.errors import ModelError
from plasmid_convert import DCP, HF, convert
from plasmid_megatron.conversion import TorchDistFolder
from safetensors.torch import load_file

from tests.vision_folders import (
    NAMES,
    full_model,
    fuse_experts,
    make_vision_folder,
    others_of,
    text_of,
    vision_folders,
)

TOLERANCE = {"gemma3": 1e-5, "qwen3_5": 1e-5, "qwen3_5_moe": 3e-5}
"""Tolerance of fp32 logits; those of transformers differ from fp64 by up to 2.6e-5 with experts."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return vision_folders(tmp_path_factory)


def full_logits(model, rows):
    """Return logits [T, V] at the position before each token, by transformers' model of text and images."""
    import torch

    lm, parts = full_model(model), []
    for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        with torch.no_grad():
            logits = lm(input_ids=torch.from_numpy(rows.token_ids[start:end]).long()[None]).logits[0]
        parts += [logits.new_zeros(1, logits.shape[1]), logits[:-1]]
    return torch.cat(parts).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_are_those_of_the_full_model_and_the_export_is_the_folder(name, ranks, models, tmp_path):
    model, rows = models(name), whole_rows(small_batch())
    found = asyncio.run(network_logits(ranks, model, rows, folder=tmp_path / "out"))
    assert_identical(*(load_file(path / "model.safetensors") for path in (tmp_path / "out", model)))
    expected = full_logits(model, rows)
    assert np.abs(expected).max() > 0.5 and np.abs(found - expected).max() < TOLERANCE[name]


def test_experts_in_one_tensor_are_read_and_exported_one_by_one(ranks, models, tmp_path):
    model, rows = make_vision_folder(tmp_path / "model", "qwen3_5_moe"), whole_rows(small_batch())
    expected = load_file(model / "model.safetensors")
    found = asyncio.run(network_logits(ranks, fuse_experts(model), rows, folder=tmp_path / "out"))
    assert np.abs(found - full_logits(model, rows)).max() < TOLERANCE["qwen3_5_moe"]
    assert_identical(load_file(tmp_path / "out/model.safetensors"), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_training_the_text_model_matches_transformers(name, ranks, models, tmp_path):
    expected = plain_outcome(models(name), tmp_path / "plain")
    found = asyncio.run(outcome(ranks, tmp_path / "out", model=models(name), trainer=ADAM))
    assert_identical(others_of(found.weights), others_of(load_file(models(name) / "model.safetensors")))
    found.weights, expected.weights = text_of(found.weights), text_of(expected.weights)
    assert_alike(found, expected, 2e-5)


CONVERTED = [("megatron", "gemma3"), ("fsdp", "gemma3"), ("fsdp", "qwen3_5_moe")]


@pytest.mark.parametrize(("kind", "name"), CONVERTED)
def test_the_checkpoint_of_a_run_becomes_what_the_run_exports(kind, name, ranks, models, tmp_path):
    async def run():
        trainer, config = await ranks.start(kind=kind, trainer={"lr": 1e-2}, model=models(name))
        await fit(trainer, config, make_batch())
        await trainer.save(tmp_path / "batch-000001/trainer")
        await trainer.export(tmp_path / "exported")

    asyncio.run(run())
    state = {"config": {"model": {"path": str(models(name)), "tokenizer": "auto"}}}
    (tmp_path / "batch-000001/state.json").write_text(json.dumps(state))
    reader = TorchDistFolder() if kind == "megatron" else DCP()
    convert(tmp_path / "batch-000001", tmp_path / "out", reader=reader, writer=HF())
    assert_identical(*(load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "exported")))


def test_the_distributed_format_contains_no_vision_model(models, tmp_path):
    with pytest.raises(ModelError, match="the source has a vision model, whose weights layout torch_dist does not"):
        convert(models("gemma3"), tmp_path / "out", reader=HF(), writer=TorchDistFolder())
    assert not list(tmp_path.glob("*out*"))
