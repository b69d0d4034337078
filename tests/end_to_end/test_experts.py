"""Mixtures of experts, from a model folder to a trained policy, with both trainers and the embedded engine."""

import json
import shutil
import subprocess
import sys

import pytest
from megatron_families import make_family
from plasmid_convert import DCP
from plasmid_runtime.observe.journal import read_journal
from safetensors.torch import load_file

from tests.fp8_folders import decoded, make_fp8_folder
from tests.vision_folders import fuse_experts

OTHERS = ["GLM-4.5", "DeepSeek-V3"]
LEARNING = {"batches": 30, "prompts_per_batch": 4, "samples_per_prompt": 8}
RECIPE = """
plugins = ["digit_share.py"]
model.path = "{model}"
rollout.kind = "hf"
rewards = [{{ kind = "digit-share" }}]
sampling.max_new_tokens = 4
data.path = "train.jsonl"
placement = {{ trainer_ranks = 2, start_timeout_s = 900 }}

[trainer]
kind = "megatron"
lr = 3e-3
expert_parallel = 2

[algorithm]
kind = "grpo"

[checkpoint]
every = 10

[run]
batches = 20
prompts_per_batch = 4
samples_per_prompt = 8
"""


def rl(folder, *arguments):
    command = [sys.executable, "-m", "plasmid_cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    return done.stdout


def journal(folder):
    return [dict(entry.metrics) for entry in read_journal(folder / "metrics.jsonl")]


def train_a_mixture(job, folder, run, family="Qwen3-MoE"):
    model = make_family(folder / "moe", family)
    result = job.run({"model": {"path": str(model)}, "run": run})
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
    return load_file(model / "model.safetensors"), result


@pytest.mark.parametrize("family", ["Qwen3-MoE", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_a_mixture_of_experts_comes_out_of_a_run_under_the_names_of_its_folder(family, job, tmp_path):
    theirs, _ = train_a_mixture(job, tmp_path, {"batches": 2}, family)
    ours = load_file(tmp_path / "run/final/model.safetensors")
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert not any(ours[name].equal(theirs[name]) for name in theirs if name.endswith(".mlp.gate.weight"))
    converted, checkpoint = DCP(), tmp_path / "run/checkpoints/batch-000002"
    assert len(converted.open_tensors(checkpoint).tensors) == len(ours)
    read = dict(converted.read(checkpoint))
    assert read.keys() == ours.keys() and all(ours[name].equal(tensor) for name, tensor in read.items())


def test_a_run_from_a_folder_in_fp8_blocks_exports_plain_weights(job, tmp_path):
    model = make_fp8_folder(make_family(tmp_path / "moe", "Qwen3-MoE"), tmp_path / "fp8")
    job.run({"model": {"path": str(model)}, "run": {"batches": 2}})
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
    ours, theirs = load_file(tmp_path / "run/final/model.safetensors"), decoded(model)
    assert {name: tuple(t.shape) for name, t in ours.items()} == {name: tuple(t.shape) for name, t in theirs.items()}
    assert max((ours[name] - tensor.float()).abs().max() for name, tensor in theirs.items()) < 0.1
    assert "quantization_config" not in json.loads((tmp_path / "run/final/config.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_mixture_of_experts_learns(job, tmp_path, seed):
    _, result = train_a_mixture(job, tmp_path, LEARNING | {"seed": seed})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert before < 0.45
    assert after > 0.9


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_experts_on_two_ranks_learn_through_the_command_and_go_on_in_another_split(job, tmp_path):
    job.plain()
    folder, model = job.folder, make_family(tmp_path / "moe", "Qwen3-MoE")
    (folder / "digits.toml").write_text(RECIPE.format(model=model))
    assert "batch 20/20" in rl(folder, "train", "digits.toml", "run.dir=whole")
    whole = journal(folder / "whole")
    assert max(m["train/logprob_diff_max"] for m in whole) < 2e-5
    assert max(m["train/grad_norm"] for m in whole) < 100
    rewards = [m["reward/mean"] for m in whole]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    shutil.copytree(folder / "whole", folder / "again")
    shutil.rmtree(folder / "again/checkpoints/batch-000020")
    shutil.copytree(folder / "again", folder / "other")
    rl(folder, "train", "digits.toml", "run.dir=again", "--resume")
    assert learned(journal(folder / "again")) == learned(whole)
    split = ("trainer.expert_parallel=1", "trainer.tensor_parallel=2")
    rl(folder, "train", "digits.toml", "run.dir=other", "--resume", *split)
    (ours, *_), (theirs, *_) = journal(folder / "other")[10:], whole[10:]
    assert ours["reward/mean"] == theirs["reward/mean"]
    assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)


def learned(metrics):
    return [{k: v for k, v in m.items() if k.startswith(("train/", "reward/"))} for m in metrics]


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_of_experts_train_through_the_command(family, job, tmp_path):
    job.plain()
    folder, model = job.folder, make_family(tmp_path / "moe", family)
    (folder / "digits.toml").write_text(RECIPE.format(model=model))
    split = ("trainer.tensor_parallel=2", "trainer.expert_tensor_parallel=1")
    rl(folder, "train", "digits.toml", "run.dir=whole", "run.batches=2", "checkpoint.every=2", *split)
    assert max(m["train/logprob_diff_max"] for m in journal(folder / "whole")) < 2e-5
    assert json.loads((folder / "whole/final/config.json").read_text())["model_type"] in ("glm4_moe", "deepseek_v3")


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("adapter", [(), ('trainer.lora={rank=4, alpha=8.0, targets=["experts.*proj"]}',)])
def test_megatron_trains_folders_with_fused_experts_through_the_command(adapter, job, tmp_path):
    job.plain()
    folder, model = job.folder, fuse_experts(make_family(tmp_path / "moe", "Qwen3-MoE"))
    names = load_file(model / "model.safetensors").keys()
    assert sum(".experts." in name for name in names) == 4
    (folder / "digits.toml").write_text(RECIPE.format(model=model))
    rl(folder, "train", "digits.toml", "run.batches=3", "checkpoint.every=3", "run.dir=x", *adapter)
    metrics = journal(folder / "x")
    assert len(metrics) == 3
    assert max(m["train/logprob_diff_max"] for m in metrics) < 2e-5


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_sglang_loads_experts_split_over_ranks_and_every_version_is_read_back(job, tmp_path):
    job.plain()
    folder, model = job.folder, make_family(tmp_path / "moe", "Qwen3-MoE")
    (folder / "digits.toml").write_text(RECIPE.format(model=model))
    engine = (
        'kind="sglang", dtype="float32", read_back_every=1, bucket_bytes=20000, server_args={max_total_tokens=4096}'
    )
    rl(folder, "train", "digits.toml", "run.batches=3", "checkpoint.every=3", "run.dir=x", f"rollout={{{engine}}}")
    metrics = journal(folder / "x")
    assert len(metrics) == 3
    assert max(m["train/logprob_diff_max"] for m in metrics) < 2e-5
    assert max(m["sync/canary_difference"] for m in metrics) < 1e-4


LORA_RECIPE = RECIPE.replace('kind = "megatron"\nlr = 3e-3\nexpert_parallel = 2', 'kind = "fsdp"\nlr = 2e-2')


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_sglang_merges_adapters_of_single_experts_and_every_version_is_read_back(job, tmp_path):
    job.plain()
    folder, model = job.folder, make_family(tmp_path / "moe", "Qwen3-MoE")
    (folder / "digits.toml").write_text(LORA_RECIPE.format(model=model))
    engine = (
        'kind="sglang", dtype="float32", read_back_every=1, bucket_bytes=20000, server_args={max_total_tokens=4096}'
    )
    lora = 'trainer.lora={rank=4, alpha=8.0, targets=["experts.*proj"]}'
    rl(folder, "train", "digits.toml", "run.batches=3", "run.dir=x", lora, f"rollout={{{engine}}}")
    metrics = journal(folder / "x")
    matrices = load_file(folder / "x/final-adapter/adapter_model.safetensors")
    assert len(metrics) == 3 and len(matrices) == 48
    size = sum(matrix.nbytes for matrix in matrices.values())
    assert all(size <= m["sync/bytes"] <= size + 16 * len(matrices) for m in metrics)
    assert max(m["train/logprob_diff_max"] for m in metrics) < 2e-5
    assert max(m["sync/canary_difference"] for m in metrics) < 1e-4
