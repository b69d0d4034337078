"""Mixtures of experts, which transformers stores in fused tensors: reading, training, saving, and export in the
layout of the folder."""

import asyncio
import json

import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch, weights_of
from megatron_cases import FSDP_ADAM, assert_alike, outcome_of, plain_outcome
from megatron_families import assert_identical, folders_of_families, make_family
from plasmid.errors import ModelError
from plasmid_fsdp.model.building import build_on_meta
from plasmid_fsdp.settings import FSDP
from plasmid_models.source import Source
from safetensors.torch import load_file, save_file

from tests.fp8_folders import make_fp8_folder, make_plain_folder

UNEVEN = {"num_experts": 5}
FAMILIES = {"Qwen3-MoE": UNEVEN, "GLM-4.5": {}, "DeepSeek-V3": {}}
BATCH = make_batch(num_groups=2)
RANKS = ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model folder of each family, created on first use; two ranks share five experts."""
    return folders_of_families(tmp_path_factory, FAMILIES)


def test_corrections_stay_in_float32(models, one_rank, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    tensors = load_file(models("DeepSeek-V3") / "model.safetensors")
    tensors = {k: t if k.endswith("e_score_correction_bias") else t.bfloat16() for k, t in tensors.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((models("DeepSeek-V3") / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((models("DeepSeek-V3") / name).read_text())
    assert len({tensor.dtype for tensor in tensors.values()}) == 2

    async def run():
        trainer, _ = await one_rank.start(model=model, trainer={"dtype": "bfloat16"})
        return await weights_of(trainer, tmp_path / "out")

    assert_identical(asyncio.run(run()), tensors)


@pytest.mark.parametrize("kind", RANKS)
def test_training_fp8_block_weights_matches_plain_weights(kind, models, request, tmp_path):
    model = make_fp8_folder(models("DeepSeek-V3"), tmp_path / "fp8", shards=2)
    expected = plain_outcome(make_plain_folder(model, tmp_path / "decoded"), tmp_path / "plain", batch=BATCH)

    async def run():
        started = await request.getfixturevalue(kind).start(model=model, trainer=FSDP_ADAM)
        return await outcome_of(*started, tmp_path / "out", batch=BATCH)

    assert_alike(asyncio.run(run()), expected, 1e-5)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("kind", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_a_mixture_of_experts_matches_transformers(kind, family, models, request, tmp_path):
    expected = plain_outcome(models(family), tmp_path / "plain", batch=BATCH)
    before = load_file(models(family) / "model.safetensors")

    async def run():
        trainer, config = await request.getfixturevalue(kind).start(model=models(family), trainer=FSDP_ADAM)
        unchanged = await weights_of(trainer, tmp_path / "same")
        return unchanged, await outcome_of(trainer, config, tmp_path / "out", batch=BATCH)

    unchanged, found = asyncio.run(run())
    assert_identical(unchanged, before)
    assert_alike(found, expected, 1e-5)
    assert largest_difference(found.weights, before) > 1e-3


@pytest.mark.parametrize(("width", "implementation"), [(32, "grouped_mm"), (10, "eager")])
def test_experts_are_multiplied_together_unless_their_sizes_are_refused(width, implementation, one_rank, tmp_path):
    model = make_family(tmp_path / "model", "Qwen3-MoE", moe_intermediate_size=width)
    source = Source(where="model", path=model, trust_remote_code=False)
    lm = build_on_meta(source, FSDP(dtype="float32"))
    assert lm.config._experts_implementation == implementation

    async def run():
        started = await one_rank.start(model=model, trainer=FSDP_ADAM)
        return await outcome_of(*started, tmp_path / "out", batch=BATCH)

    assert_alike(asyncio.run(run()), plain_outcome(model, tmp_path / "plain", batch=BATCH), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("one_rank", "one_rank"), ("two_ranks", "two_ranks")])
def test_a_resumed_mixture_continues_bit_by_bit(before, after, models, request, tmp_path):
    expected, found = asyncio.run(continued(request, before, after, models("Qwen3-MoE"), tmp_path))
    assert found[0] == expected[0]
    assert largest_difference(found[1], expected[1]) == 0


@pytest.mark.parametrize(
    ("before", "after"), [("two_ranks", "one_rank"), pytest.param("one_rank", "two_ranks", marks=pytest.mark.long)]
)
def test_a_mixture_continues_on_another_number_of_ranks(before, after, models, request, tmp_path):
    expected, found = asyncio.run(continued(request, before, after, models("Qwen3-MoE"), tmp_path))
    assert found[0][0]["train/grad_norm"] == pytest.approx(expected[0][0]["train/grad_norm"], rel=1e-5)
    assert largest_difference(found[1], expected[1]) < 2e-6


async def continued(request, before, after, model, folder):
    """Train, save, train; and load, train. Return metrics and weights of both."""
    first, second = make_batch(), make_batch(seed=1, index=1)
    trainer, config = await request.getfixturevalue(before).start(model=model, trainer=FSDP_ADAM)
    await fit(trainer, config, first)
    await trainer.save(folder / "saved")
    expected = await fit(trainer, config, second), await weights_of(trainer, folder / "a")
    trainer, config = await request.getfixturevalue(after).start(model=model, trainer=FSDP_ADAM)
    await trainer.load(folder / "saved")
    return expected, (await fit(trainer, config, second), await weights_of(trainer, folder / "b"))


def test_a_reference_of_the_same_family_is_loaded(models, one_rank, tmp_path):
    other = make_family(tmp_path / "other", "Qwen3-MoE", seed=9, **UNEVEN)
    algorithm = {"kl_coef": 0.1, "old_policy": "trainer"}

    async def kl(reference):
        trainer, config = await one_rank.start(model=models("Qwen3-MoE"), reference=reference, algorithm=algorithm)
        (report,) = await fit(trainer, config, make_batch())
        return report["train/kl"]

    assert abs(asyncio.run(kl(models("Qwen3-MoE")))) < 1e-6 < 1e-3 < asyncio.run(kl(other))


def test_experts_are_frozen_by_their_names_in_the_folder_and_only_together(models, one_rank, tmp_path):
    model, before = models("Qwen3-MoE"), load_file(models("Qwen3-MoE") / "model.safetensors")

    async def run(pattern):
        trainer, config = await one_rank.start(model=model, trainer={"freeze": [pattern]})
        await fit(trainer, config, make_batch())
        return await weights_of(trainer, tmp_path / "out")

    after = asyncio.run(run(r"layers\.0\.mlp\.experts\.\d+\.(gate|up|down)_proj"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any("layers.0.mlp.experts." in name for name in moved)
    assert any("layers.1.mlp.experts." in name for name in moved)
    with pytest.raises(ModelError, match=r"freeze all or none: .*experts\.1\.gate_proj\.weight.* still be trained"):
        asyncio.run(run(r"layers\.0\.mlp\.experts\.0\."))


def test_a_critic_of_experts_is_read_and_written_by_the_names_of_its_folder(models, one_rank, tmp_path):
    model = models("Qwen3-MoE")
    settings = {"critic": {"lr": 0.0, "weight_decay": 0.0, "export": True}}

    async def run():
        trainer, config = await one_rank.start(model=model, algorithm={"kind": "ppo"}, trainer=settings)
        await fit(trainer, config, make_batch())
        await trainer.export(tmp_path / "out")

    asyncio.run(run())
    ours = load_file(tmp_path / "out-critic/model.safetensors")
    theirs = load_file(model / "model.safetensors")
    assert ours.keys() - theirs.keys() == {"score.weight", "score.bias"}
    assert theirs.keys() - ours.keys() == {"lm_head.weight"}
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items() if name in ours)
