"""Sliding windows, attention sinks and linear attention in whole runs: trainer and engine agree on every token."""

import json

import pytest
import torch
from megatron_families import LINEAR, WINDOWS, make_family
from safetensors.torch import load_file

from tests.mxfp4_folders import decoded, make_mxfp4_folder

QUICK = ("gpt-oss", "Qwen3.5")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in (*WINDOWS, *LINEAR)]
EXPERTS = [pytest.param(name, marks=pytest.mark.long) for name in ("gpt-oss", "Qwen3-Next", "Qwen3.5-MoE")]


def train(job, folder, family, trainer):
    """Run two batches with texts longer than the windows; return the original folder and the export."""
    model = make_family(folder / "model", family)
    job.run(
        {
            "model": {"path": str(model)},
            "run": {"batches": 2},
            "sampling": {"max_new_tokens": 12},
            "trainer": trainer,
            "eval": [],
        }
    )
    return load_file(model / "model.safetensors"), load_file(folder / "run/final/model.safetensors")


@pytest.mark.parametrize("family", NAMES)
def test_a_family_is_trained_on_what_the_engine_samples(family, job, tmp_path):
    before, after = train(job, tmp_path, family, {})
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    assert not any(after[name].equal(tensor) for name, tensor in before.items() if "norm" in name)


def test_a_run_from_a_folder_in_mxfp4_exports_plain_weights(job, tmp_path):
    model = make_mxfp4_folder(make_family(tmp_path / "model", "gpt-oss"), tmp_path / "mxfp4", dtype=torch.float32)
    job.run({"model": {"path": str(model)}, "run": {"batches": 2}, "eval": []})
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
    ours, theirs = load_file(tmp_path / "run/final/model.safetensors"), decoded(model)
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert max((ours[name] - tensor.float()).abs().max() for name, tensor in theirs.items()) < 0.1
    assert "quantization_config" not in json.loads((tmp_path / "run/final/config.json").read_text())


@pytest.mark.parametrize("family", EXPERTS)
def test_the_engine_records_the_experts_that_the_trainer_replays(family, job, tmp_path):
    train(job, tmp_path, family, {"routing_replay": True})
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
