"""Qwen3-Next and Qwen3.5: linear attention, output gates and gated shared experts compute the same as in
transformers."""

import asyncio
import json

import numpy as np
import pytest
import torch
from fsdp_cases import whole_rows
from megatron_cases import (
    ADAM,
    assert_alike,
    largest_difference,
    make_batch,
    make_config,
    outcome,
    plain_outcome,
    small_batch,
)
from megatron_families import LINEAR, assert_identical, folders_of_families, make_family, network_logits, plain_logits
from megatron_resume import assert_continues, resumed, saved
from plasmid.errors import ConfigError, ModelError
from plasmid_megatron.settings import Megatron
from plasmid_megatron.shapes import check_split
from plasmid_models.source import Source
from routing_cases import with_experts
from safetensors.torch import load_file, save_file

from tests.lazy_module import LazyModule

bridge = LazyModule("plasmid_megatron.weights.bridge")  # imports Megatron

PP2, EP2 = {"pipeline_parallel": 2}, {"expert_parallel": 2}
LAYOUTS = {
    "pp2": (2, PP2),
    "ep2": (2, EP2),
    "dp2": (2, {}),
    "pp2 interleaved": (2, PP2 | {"virtual_pipeline": 2, "microbatch_samples": 3}),
    "ep2 pp2": (4, EP2 | PP2),
    "recomputed": (
        1,
        {"transformer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    ),
    "small microbatches": (1, {"microbatch_tokens": 30}),
}


def slow(names, *fast):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return folders_of_families(tmp_path_factory)


@pytest.mark.parametrize("family", LINEAR)
def test_a_family_is_exported_unchanged_with_logits_of_transformers(family, ranks, models, tmp_path):
    model, rows = models(family), whole_rows(small_batch())
    found = asyncio.run(network_logits(ranks, model, rows, folder=tmp_path / "out"))
    assert_identical(*(load_file(path / "model.safetensors") for path in (tmp_path / "out", model)))
    expected = plain_logits(model, rows)
    assert np.abs(expected).max() > 0.5 and np.abs(found - expected).max() < 1e-5


def assert_learns(ranks, model, folder, num_ranks, trainer):
    expected = plain_outcome(model, folder / "plain")
    found = asyncio.run(outcome(ranks, folder / "out", model=model, num_ranks=num_ranks, trainer=ADAM | trainer))
    assert_alike(found, expected, 2e-5)  # rounding within the chunks of the recurrence: up to 9e-6 in a weight
    before = load_file(model / "model.safetensors")
    assert all(not found.weights[name].equal(tensor) for name, tensor in before.items() if "embed" not in name)


@pytest.mark.long
@pytest.mark.parametrize("family", LINEAR)
def test_training_a_family_matches_transformers(family, ranks, models, tmp_path):
    assert_learns(ranks, models(family), tmp_path, 1, {})


@pytest.mark.parametrize("layout", slow(LAYOUTS, "ep2"))
def test_qwen3_next_learns_the_same_in_every_layout(layout, ranks, models, tmp_path):
    assert_learns(ranks, models("Qwen3-Next"), tmp_path, *LAYOUTS[layout])


@pytest.mark.long
def test_samples_of_one_length_are_a_block_without_padding(ranks, models, tmp_path):
    batch, model = make_batch(longest=6), models("Qwen3.5")
    found = asyncio.run(outcome(ranks, tmp_path / "out", model=model, batch=batch, trainer=ADAM))
    assert_alike(found, plain_outcome(model, tmp_path / "plain", batch=batch), 1e-5)


@pytest.mark.parametrize("layout", slow(("pp2", "ep2"), "pp2"))
def test_a_resumed_trainer_continues_bit_by_bit(layout, ranks, models, tmp_path):
    reports, weights = asyncio.run(saved(ranks, LAYOUTS[layout], tmp_path, model=models("Qwen3-Next")))
    again, same = asyncio.run(resumed(ranks, LAYOUTS[layout], tmp_path, model=models("Qwen3-Next")))
    assert again == reports
    assert largest_difference(weights, same) == 0


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("pp2", "ep2"), ("ep2", "ep2 pp2")])
def test_a_checkpoint_continues_in_another_layout(before, after, ranks, models, tmp_path):
    assert_continues(ranks, LAYOUTS[before], LAYOUTS[after], tmp_path, model=models("Qwen3-Next"))


@pytest.mark.long
def test_given_experts_are_replayed(ranks, models, tmp_path):
    batch, model = with_experts(make_batch(), layers=4), models("Qwen3-Next")
    trainer = ADAM | EP2 | {"routing_replay": True}
    found = asyncio.run(outcome(ranks, tmp_path / "out", batch=batch, num_ranks=2, trainer=trainer, model=model))
    assert_alike(found, plain_outcome(model, tmp_path / "plain", batch=batch), 1e-5)


@pytest.mark.long
def test_layers_that_predict_further_tokens_go_along(ranks, tmp_path):
    model = make_family(tmp_path / "model", "Qwen3-Next")
    tensors = load_file(model / "model.safetensors") | {"mtp.fc.weight": torch.randn(64, 128)}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    rows = whole_rows(small_batch())
    asyncio.run(network_logits(ranks, model, rows, num_ranks=2, trainer=EP2, folder=tmp_path / "out"))
    assert_identical(load_file(tmp_path / "out/model.safetensors"), tensors)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"tensor_parallel": 2},
            "trainer.tensor_parallel: must be 1 for models with linear attention, whose layers are not split, got 2; "
            "use pipeline_parallel or expert_parallel",
        ),
        ({"tensor_parallel": 3}, "trainer.tensor_parallel: must be 1 for models with linear attention"),
        ({"context_parallel": 2}, "trainer.context_parallel: must be 1 for models with linear attention"),
        ({"compile": True}, "trainer.compile: layers with linear attention cannot be compiled; remove the setting"),
        ({"lora": {}}, "trainer.lora: trainer 'megatron' cannot train an adapter of a model with linear attention"),
    ],
    ids=str,
)
def test_settings_that_linear_attention_does_not_support_are_refused(trainer, message):
    with pytest.raises(ConfigError) as error:
        check_split(Megatron(**trainer), {"model_type": "qwen3_next", "num_attention_heads": 4})
    assert message in str(error.value)


def test_microbatches_are_limited_with_the_padding(models, ranks, monkeypatch):
    units = []

    async def record(context, make_backend, *, microbatching, async_save):
        units.append(microbatching.unit)
        raise ConfigError("recorded")

    monkeypatch.setattr("plasmid_megatron.trainer.start_ranks", record)
    for name in ("Qwen3.5", "Qwen2"):
        with pytest.raises(ConfigError, match="recorded"):
            asyncio.run(ranks.start(model=models(name)))
    assert units == ["tokens", "packed"]


def test_prefixes_are_not_shared(models, ranks):
    model = models("Qwen3.5")
    described = json.loads((model / "config.json").read_text())
    assert make_config(model).trainer.sharing_obstacle(described) == "needs a model without linear attention"
    with pytest.raises(ConfigError, match=r"trainer\.share_prefixes: needs a model without linear attention"):
        asyncio.run(ranks.start(model=model, trainer={"share_prefixes": True}))


@pytest.mark.parametrize(
    ("settings", "trainer", "message"),
    [
        ({"attention_bias": True}, {}, r"has attention_bias = true, which trainer 'megatron' cannot"),
        ({"mlp_only_layers": [1]}, {}, r"has mlp_only_layers = \[1\], which trainer 'megatron' cannot"),
        ({"decoder_sparse_step": 2}, {}, r"has decoder_sparse_step = 2, which trainer 'megatron' cannot"),
        ({}, {"transformer_engine": True, "dtype": "bfloat16"}, r"would compute model type 'qwen3_next' differently"),
    ],
)
def test_settings_that_would_change_the_outputs_are_refused(settings, trainer, message, tmp_path):
    model = make_family(tmp_path / "model", "Qwen3-Next", **settings)
    with pytest.raises(ModelError, match=message):
        bridge.read_architecture(Source(where="model", path=model, trust_remote_code=False), Megatron(**trainer))
