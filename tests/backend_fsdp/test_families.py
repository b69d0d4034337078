"""Sliding windows, attention sinks and linear attention: trained, saved and written as with transformers alone."""

import asyncio

import pytest
from fsdp_cases import largest_difference
from megatron_cases import FSDP_ADAM, assert_alike, outcome_of, plain_outcome
from megatron_families import LINEAR, WINDOWS, assert_identical, folders_of_families
from plasmid.errors import ModelError
from plasmid_fsdp.model.building import build_on_meta
from plasmid_fsdp.settings import FSDP
from plasmid_models.source import Source
from safetensors.torch import load_file

PADDED = {"attention": "sdpa"}
TRAINED = [(name, {}) for name in WINDOWS] + [(name, PADDED) for name in LINEAR] + [("gpt-oss", {"attention": "eager"})]
CASES = [pytest.param(name, options, id=" ".join([name, *options.values()])) for name, options in TRAINED]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return folders_of_families(tmp_path_factory)


@pytest.mark.parametrize("kind", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.long)])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_a_family_learns_what_it_learns_with_transformers(kind, family, options, models, request, tmp_path):
    expected, ranks = plain_outcome(models(family), tmp_path / "plain"), request.getfixturevalue(kind)
    before = load_file(models(family) / "model.safetensors")

    async def run():
        trainer, config = await ranks.start(model=models(family), trainer=FSDP_ADAM | options)
        await trainer.export(tmp_path / "same")
        return await outcome_of(trainer, config, tmp_path / "out")

    found = asyncio.run(run())
    assert_identical(load_file(tmp_path / "same/model.safetensors"), before)
    assert_alike(found, expected, 1e-5)
    assert largest_difference(found.weights, before) > 1e-3


def test_sinks_are_trained(models, one_rank, tmp_path):
    async def run():
        return await outcome_of(*await one_rank.start(model=models("gpt-oss"), trainer=FSDP_ADAM), tmp_path / "out")

    before, after = load_file(models("gpt-oss") / "model.safetensors"), asyncio.run(run()).weights
    sinks = [name for name in before if name.endswith(".sinks")]
    assert sinks and all((after[name] - before[name]).abs().max() > 1e-3 for name in sinks)


@pytest.mark.parametrize("family", LINEAR)
def test_linear_attention_is_not_packed(family, models):
    source = Source(where="model", path=models(family), trust_remote_code=False)
    said = r"has layers of kind 'linear_attention', which mix packed samples; set it to 'sdpa'"
    with pytest.raises(ModelError, match=said):
        build_on_meta(source, FSDP(dtype="float32"))
