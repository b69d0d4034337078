"""Sliding windows, attention sinks and linear attention in whole runs: trainer and engine agree on every token."""

import pytest
from megatron_families import LINEAR, WINDOWS, make_family
from safetensors.torch import load_file

QUICK = ("gpt-oss", "Qwen3.5")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in (*WINDOWS, *LINEAR)]
EXPERTS = [pytest.param(name, marks=pytest.mark.long) for name in ("gpt-oss", "Qwen3-Next", "Qwen3.5-MoE")]


def train(job, folder, family, trainer):
    """A run of three batches with texts longer than the windows; the folder before, and what was exported."""
    model = make_family(folder / "model", family)
    trainer |= {"attention": "sdpa"} if family in LINEAR else {}
    job.run(
        {
            "model": {"path": str(model)},
            "run": {"batches": 3},
            "sampling": {"max_new_tokens": 12},
            "trainer": trainer,
        }
    )
    return load_file(model / "model.safetensors"), load_file(folder / "run/final/model.safetensors")


@pytest.mark.parametrize("family", NAMES)
def test_a_family_is_trained_on_what_the_engine_samples(family, job, tmp_path):
    before, after = train(job, tmp_path, family, {})
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    assert not any(after[name].equal(tensor) for name, tensor in before.items() if "norm" in name)


@pytest.mark.parametrize("family", EXPERTS)
def test_the_engine_records_the_experts_that_the_trainer_replays(family, job, tmp_path):
    train(job, tmp_path, family, {"routing_replay": True})
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
