"""Every model family is exported as it was loaded, and computes and learns the same as with transformers."""

import asyncio
import json

import numpy as np
import pytest
import torch
from fsdp_cases import whole_rows
from megatron_cases import (
    ADAM,
    assert_alike,
    fit,
    largest_difference,
    make_batch,
    outcome,
    plain_outcome,
    small_batch,
    weights_of,
)
from megatron_families import (
    FAMILIES,
    YARN,
    assert_identical,
    folders_of_families,
    in_bfloat16_with_a_draft_layer,
    make_family,
    network_logits,
    plain_logits,
    tensor_parallel,
)
from plasmid.errors import ModelError
from plasmid_megatron.settings import Megatron
from plasmid_models.source import Source
from safetensors.torch import load_file

from tests.fp8_folders import decoded, make_fp8_folder
from tests.lazy_module import LazyModule

bridge = LazyModule("plasmid_megatron.weights.bridge")  # imports Megatron

TP2 = {"tensor_parallel": 2}
SAVED = ["GLM-4", *(pytest.param(name, marks=pytest.mark.long) for name in ("GLM-4.5", "DeepSeek-V3"))]
LAYOUTS = {
    "pp2": (2, {"pipeline_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "ep2": (2, {"expert_parallel": 2}),
    "ep2 tp2": (2, TP2 | {"expert_parallel": 2, "expert_tensor_parallel": 1}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return folders_of_families(tmp_path_factory)


def assert_same_network(ranks, model, folder, **options):
    rows = whole_rows(small_batch())
    found = asyncio.run(network_logits(ranks, model, rows, folder=folder / "out", **options))
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder / "out", model))
    assert_identical(ours, theirs)
    expected = plain_logits(model, rows)
    assert np.abs(expected).max() > 0.5
    assert np.abs(found - expected).max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exported_unchanged_with_logits_of_transformers(family, ranks, models, tmp_path):
    assert_same_network(ranks, models(family), tmp_path)


@pytest.mark.long
def test_the_attention_factor_of_yarn_scales_queries_and_keys(ranks, tmp_path):
    assert_same_network(ranks, make_family(tmp_path / "model", "Qwen3", rope_parameters=YARN), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_so_do_two_ranks_with_a_part_of_every_matrix_each(family, ranks, models, tmp_path):
    assert_same_network(ranks, models(family), tmp_path, num_ranks=2, trainer=tensor_parallel(family))


@pytest.mark.parametrize(
    "layout", [pytest.param((1, {}), marks=pytest.mark.long), (2, {"pipeline_parallel": 2})], ids=["one", "pp2"]
)
def test_corrections_stay_in_float32_and_draft_layers_go_along(layout, ranks, tmp_path):
    model = in_bfloat16_with_a_draft_layer(make_family(tmp_path / "model", "DeepSeek-V3"))
    num_ranks, trainer = layout

    async def export():
        started, _ = await ranks.start(model=model, num_ranks=num_ranks, trainer=trainer | {"dtype": "bfloat16"})
        return await weights_of(started, tmp_path / "out")

    ours, theirs = asyncio.run(export()), load_file(model / "model.safetensors")
    assert len({tensor.dtype for tensor in theirs.values()}) == 2
    assert_identical(ours, theirs)


@pytest.mark.parametrize("layout", [pytest.param((1, {}), marks=pytest.mark.long), (2, TP2)], ids=["one", "tp2"])
def test_a_folder_in_fp8_blocks_is_exported_in_bfloat16_draft_layers_included(layout, ranks, tmp_path):
    plain = in_bfloat16_with_a_draft_layer(make_family(tmp_path / "model", "DeepSeek-V3"))
    model = make_fp8_folder(plain, tmp_path / "fp8", shards=2)
    num_ranks, trainer = layout

    async def export():
        started, _ = await ranks.start(model=model, num_ranks=num_ranks, trainer=trainer | {"dtype": "bfloat16"})
        return await weights_of(started, tmp_path / "out")

    expected = {n: t.float().bfloat16() if t.dtype == torch.float64 else t for n, t in decoded(model).items()}
    assert_identical(asyncio.run(export()), expected)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def assert_learns(ranks, model, folder, num_ranks, trainer):
    expected = plain_outcome(model, folder / "plain")
    found = asyncio.run(outcome(ranks, folder / "out", model=model, num_ranks=num_ranks, trainer=ADAM | trainer))
    assert_alike(found, expected, 1e-5)
    before = load_file(model / "model.safetensors")
    assert largest_difference(found.weights, before) > 1e-3


@pytest.mark.parametrize("family", ["GLM-4", pytest.param("DeepSeek-V3", marks=pytest.mark.long)])
def test_training_a_split_family_matches_transformers(family, ranks, models, tmp_path):
    assert_learns(ranks, models(family), tmp_path, 2, TP2)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_training_every_family_matches_transformers(family, ranks, models, tmp_path):
    assert_learns(ranks, models(family), tmp_path, 1, {})


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["GLM-4.5", "DeepSeek-V3"])
def test_families_of_experts_learn_the_same_in_every_layout(family, layout, ranks, models, tmp_path):
    assert_learns(ranks, models(family), tmp_path, *LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["pp2", pytest.param("cp2", marks=pytest.mark.long)])
def test_windows_and_their_rotary_positions_are_those_of_each_layer_in_every_layout(layout, ranks, models, tmp_path):
    assert_learns(ranks, models("Gemma 3"), tmp_path, *LAYOUTS[layout])


@pytest.mark.long
def test_stages_of_unlike_numbers_of_layers_learn_the_same(ranks, tmp_path):
    model = make_family(tmp_path / "model", "DeepSeek-V3", num_layers=5)
    uneven = {"pipeline_parallel": 2, "transformer": {"num_layers_in_last_pipeline_stage": 2}}
    assert_learns(ranks, model, tmp_path, 2, uneven)


@pytest.mark.parametrize("family", SAVED)
@pytest.mark.parametrize(
    "after", [pytest.param(TP2, marks=pytest.mark.long), {"pipeline_parallel": 2}], ids=["tp2", "pp2"]
)
def test_a_checkpoint_of_a_family_continues_in_another_layout(family, after, ranks, models, tmp_path):
    batches = [make_batch(seed=seed, index=seed) for seed in range(2)]

    async def run():
        trainer, config = await ranks.start(model=models(family), num_ranks=2, trainer=ADAM | TP2)
        await fit(trainer, config, batches[0])
        await trainer.save(tmp_path / "saved")
        expected = await fit(trainer, config, batches[1])
        weights = await weights_of(trainer, tmp_path / "a")
        trainer, config = await ranks.start(model=models(family), num_ranks=2, trainer=ADAM | after)
        await trainer.load(tmp_path / "saved")
        found = await fit(trainer, config, batches[1])
        assert found[0]["train/grad_norm"] == pytest.approx(expected[0]["train/grad_norm"], rel=1e-5)
        assert largest_difference(await weights_of(trainer, tmp_path / "b"), weights) < 2e-6

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "trainer", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, {}, r"has attn_logit_softcapping = 50\.0, which trainer 'megatron' cannot"),
        ({"hidden_activation": "silu"}, {}, r"has hidden_activation = 'silu', which trainer 'megatron' cannot"),
        (
            {},
            {"transformer_engine": True, "dtype": "bfloat16"},
            r"transformer_engine: would compute model type 'gemma3_text' differently",
        ),
    ],
)
def test_unsupported_gemma_3_settings_are_refused(settings, trainer, message, tmp_path):
    model = make_family(tmp_path / "model", "Gemma 3", **settings)
    with pytest.raises(ModelError, match=message):
        bridge.read_architecture(Source(where="model", path=model, trust_remote_code=False), Megatron(**trainer))
