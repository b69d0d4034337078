"""Sliding windows, attention sinks and linear attention: training, saving and export match transformers."""

import asyncio
import functools
import json

import plasmid_fsdp.model.policy as policy_module
import pytest
import torch
from fsdp_cases import largest_difference
from megatron_cases import FSDP_ADAM, assert_alike, make_batch, outcome_of, plain_outcome
from megatron_families import LINEAR, WINDOWS, assert_identical, folders_of_families
from plasmid.errors import ConfigError
from routing_cases import with_experts
from safetensors.torch import load_file

from tests.mxfp4_folders import make_mxfp4_folder, make_plain_folder

PADDED = [("Qwen3-Next", {"attention": "sdpa"}), ("gpt-oss", {"attention": "eager"})]
TRAINED = [(name, {}) for name in (*WINDOWS, *LINEAR)] + PADDED
LONG = (("Qwen3.5", {}), ("Qwen3-Next", {"attention": "sdpa"}))
CASES = [
    pytest.param(*case, id=" ".join([case[0], *case[1].values()]), marks=[pytest.mark.long] * (case in LONG))
    for case in TRAINED
]


BATCH = make_batch(num_groups=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return folders_of_families(tmp_path_factory)


@pytest.fixture(scope="module")
def plain(models, tmp_path_factory):
    """Return a function that trains a family with transformers, once."""
    return functools.cache(lambda family: plain_outcome(models(family), tmp_path_factory.mktemp("plain"), batch=BATCH))


@pytest.mark.parametrize("kind", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.long)])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_training_a_family_matches_transformers(kind, family, options, models, plain, request, tmp_path):
    ranks = request.getfixturevalue(kind)
    before = load_file(models(family) / "model.safetensors")

    async def run():
        trainer, config = await ranks.start(model=models(family), trainer=FSDP_ADAM | options)
        await trainer.export(tmp_path / "same")
        return await outcome_of(trainer, config, tmp_path / "out", batch=BATCH)

    found = asyncio.run(run())
    assert_identical(load_file(tmp_path / "same/model.safetensors"), before)
    assert_alike(found, plain(family), 1e-5)
    assert largest_difference(found.weights, before) > 1e-3
    sinks = [name for name in before if name.endswith(".sinks")]
    assert bool(sinks) == (family == "gpt-oss")
    assert all((found.weights[name] - before[name]).abs().max() > 1e-3 for name in sinks)


@pytest.mark.parametrize("kind", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.long)])
def test_training_mxfp4_weights_matches_plain_weights(kind, models, request, tmp_path):
    model = make_mxfp4_folder(models("gpt-oss"), tmp_path / "mxfp4", dtype=torch.float32)
    expected = plain_outcome(make_plain_folder(model, tmp_path / "decoded"), tmp_path / "plain", batch=BATCH)

    async def run():
        started = await request.getfixturevalue(kind).start(model=model, trainer=FSDP_ADAM)
        return await outcome_of(*started, tmp_path / "out", batch=BATCH)

    assert_alike(asyncio.run(run()), expected, 1e-5)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_linear_attention_learns_the_same_in_recomputed_microbatches(models, plain, one_rank, tmp_path):
    layout = {"activation_checkpointing": True, "microbatch_tokens": 60}

    async def run():
        trainer, config = await one_rank.start(model=models("Qwen3-Next"), trainer=FSDP_ADAM | layout)
        return await outcome_of(trainer, config, tmp_path / "out", batch=BATCH)

    assert_alike(asyncio.run(run()), plain("Qwen3-Next"), 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": {"kind": "ppo"}},
        {"trainer": FSDP_ADAM | {"lora": {"rank": 4}}},
        {"trainer": FSDP_ADAM | {"routing_replay": True}},
    ],
    ids=["critic", "adapter", "replayed"],
)
def test_packed_and_padded_samples_learn_the_same(options, models, one_rank, tmp_path):
    batch = with_experts(make_batch(num_groups=2), layers=4)

    async def run(attention):
        trainer = {**FSDP_ADAM, **options.get("trainer", {}), "attention": attention}
        started = await one_rank.start(model=models("Qwen3-Next"), **(options | {"trainer": trainer}))
        return await outcome_of(*started, tmp_path / attention, batch=batch)

    packed, padded = asyncio.run(run("auto")), asyncio.run(run("sdpa"))
    assert_alike(packed, padded, 1e-5)
    assert packed.reports[0].keys() == padded.reports[0].keys()


def test_microbatches_are_limited_with_the_padding_of_linear_attention(models, one_rank, monkeypatch):
    seen = []
    monkeypatch.setattr(policy_module, "decoder_input", recording(policy_module.decoder_input, seen))

    async def run():
        trainer, _ = await one_rank.start(model=models("Qwen3.5"), trainer={"microbatch_tokens": 130})
        await trainer.logprobs(make_batch(longest=60))

    asyncio.run(run())
    assert max(len(lengths) * max(lengths) for lengths in seen) <= 130 and max(map(len, seen)) > 2


def recording(function, seen):
    """The function, which notes the lengths of the samples of every microbatch."""

    def run(batch, *others, **options):
        seen.append(batch.lengths)
        return function(batch, *others, **options)

    return run


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"share_prefixes": True}, r"trainer.share_prefixes: must be 'auto' or false for models with linear attention"),
        ({"compile": True}, r"trainer.compile: must be 'auto' or false for models with linear attention"),
    ],
    ids=str,
)
def test_settings_that_linear_attention_does_not_support_are_refused(trainer, message, models, one_rank):
    with pytest.raises(ConfigError, match=message):
        asyncio.run(one_rank.start(model=models("Qwen3.5"), trainer=trainer))
