"""Modes in which SGLang is reproducible or computes like the trainer: what they set, and what they refuse."""

import asyncio
import json
from dataclasses import replace

import pytest
from plasmid.config.load import merge, resolve
from plasmid.errors import ConfigError, EngineError
from plasmid_sglang.dialect import server_arguments
from plasmid_sglang.schema import argument_errors
from sgl_cases import make_context

RELEASES = ["0.5.17", "0.5.23"]


def recipe(tmp_path, *, device="cuda", trainer="fsdp", trainer_dtype=None, **rollout):
    """Create a configuration for GPUs; nothing is started."""
    plain = make_context(tmp_path, tmp_path, dtype="auto").config.model_dump(mode="json")
    table = {"kind": trainer} if trainer_dtype is None else {"kind": trainer, "dtype": trainer_dtype}
    changes = {"trainer": table, "placement": {"device": device}, "rollout": rollout}
    return resolve(merge({**plain, "trainer": {}}, changes))


def refused(tmp_path, **settings):
    with pytest.raises(ConfigError) as error:
        recipe(tmp_path, **settings)
    return str(error.value).splitlines()


@pytest.mark.parametrize("release", RELEASES)
def test_sglang_gets_the_on_policy_arguments_for_the_trainer(tmp_path, monkeypatch, release):
    monkeypatch.setattr("plasmid_sglang.schema.installed_version", lambda product: release)
    config = recipe(tmp_path, true_on_policy=True, server_args={"attention_backend": "fa3"})
    found = server_arguments(config.rollout, config, on_gpu=True)
    assert found["rl_on_policy_target"] == "fsdp"
    assert found["enable_deterministic_inference"] is True
    assert found["attention_backend"] == "fa3"
    told = {name: found[name] for name in ("rl_on_policy_target", "enable_deterministic_inference")}
    assert list(argument_errors("sglang", told, release=release)) == []


def test_without_the_modes_sglang_gets_no_determinism_arguments(tmp_path):
    config = recipe(tmp_path)
    names = server_arguments(config.rollout, config, on_gpu=True).keys()
    assert not names & {"rl_on_policy_target", "enable_deterministic_inference"}
    config = recipe(tmp_path, deterministic=True)
    found = server_arguments(config.rollout, config, on_gpu=True)
    assert found["enable_deterministic_inference"] is True and "rl_on_policy_target" not in found


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"trainer": "no-trainer"},
            "rollout.true_on_policy: SGLang {release} supports trainers 'fsdp', but trainer.kind is 'no-trainer';"
            " remove it",
        ),
        (
            {"trainer_dtype": "float32"},
            "trainer.dtype: must be 'bfloat16' with rollout.true_on_policy, got 'float32'; set it or remove "
            "trainer.dtype",
        ),
        (
            {"dtype": "float32"},
            "rollout.dtype: must be 'bfloat16' with rollout.true_on_policy, got 'float32'; set it or remove "
            "rollout.dtype",
        ),
        (
            {"server_args": {"attention_backend": "torch_native"}},
            "rollout.server_args.attention_backend: 'torch_native' is not deterministic, as rollout.true_on_policy "
            "requires; choose one of 'fa3', 'fa4', 'flashinfer', 'triton', 'ascend', 'intel_xpu'",
        ),
        (
            {"server_args": {"sampling_backend": "flashinfer"}},
            'rollout.server_args.sampling_backend: must be "pytorch" with rollout.true_on_policy, got '
            "'flashinfer'; remove it",
        ),
        ({"device": "cpu"}, "rollout.true_on_policy: requires GPUs for SGLang's deterministic kernels; remove it"),
    ],
)
def test_settings_that_conflict_with_the_mode_are_refused(tmp_path, monkeypatch, settings, line):
    monkeypatch.setattr("plasmid_sglang.schema.installed_version", lambda product: "0.5.23")
    assert refused(tmp_path, true_on_policy=True, **settings) == [line.format(release="0.5.23")]


def test_a_release_without_the_argument_is_named(tmp_path, monkeypatch):
    cache = tmp_path / "cache/plasmid"
    cache.mkdir(parents=True)
    older = {"max_total_tokens": {"types": ["integer"]}, "sampling_mask_max_tokens": {"types": ["integer"]}}
    (cache / "sglang-0.5.2.json").write_text(json.dumps(older))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    monkeypatch.setattr("plasmid_sglang.schema.installed_version", lambda product: "0.5.2")
    (line,) = refused(tmp_path, true_on_policy=True)
    assert line == (
        "rollout.true_on_policy: SGLang 0.5.2 has no rl_on_policy_target; install a later release, or remove it"
    )


def test_a_run_that_finds_no_gpu_ends_before_a_server_starts(tmp_path):
    context = make_context(tmp_path, tmp_path)
    context = replace(context, config=recipe(tmp_path, device="auto", true_on_policy=True))
    with pytest.raises(
        ConfigError, match=r"rollout\.true_on_policy: requires GPUs for SGLang's deterministic kernels, but"
    ):
        asyncio.run(context.config.rollout.build(context))


def test_a_server_of_others_must_be_in_the_mode(shared, tmp_path):
    async def attach():
        async with shared.engine() as own:
            context = make_context(
                shared.model_path, tmp_path, server_args=None, deterministic=True, **shared.as_external(own)
            )
            try:
                await context.config.rollout.build(context)
            finally:
                await context.cluster.close()

    with pytest.raises(EngineError, match=r"was started with enable_deterministic_inference = False, but"):
        shared.run(attach())
