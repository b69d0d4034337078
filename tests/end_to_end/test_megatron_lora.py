"""An adapter trained by Megatron through `rl train`: it learns, only the adapter is sent, and resume is exact."""

import json
import shutil
import subprocess
import sys

import pytest
from megatron_families import make_family
from plasmid_runtime.observe.journal import read_journal
from safetensors.torch import load_file

RECIPE = """
plugins = ["digit_share.py"]
model.path = "{model}"
rollout.kind = "hf"
rewards = [{{ kind = "digit-share" }}]
sampling.max_new_tokens = 4
data.path = "train.jsonl"
placement = {{ trainer_ranks = {ranks}, start_timeout_s = 900 }}
algorithm = {{ kind = "grpo", kl_coef = 0.001 }}
run = {{ batches = 30, prompts_per_batch = 4, samples_per_prompt = 8 }}

[trainer]
kind = "megatron"
lr = 2e-2
lora = {{ rank = 8, alpha = 16.0 }}

[[eval]]
name = "held-out"
data.path = "test.jsonl"
samples_per_prompt = 4
"""
LAYOUTS = {0: (1, ()), 1: (2, ("trainer.tensor_parallel=2",)), 2: (2, ("trainer.pipeline_parallel=2",))}


@pytest.fixture
def folder(job):
    job.plain()
    return job.folder


def train(folder, model, ranks, *changes):
    (folder / "digits.toml").write_text(RECIPE.format(model=model, ranks=ranks))
    command = [sys.executable, "-m", "plasmid_cli", "train", "digits.toml", *changes]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr


def metrics_of(folder):
    return [dict(entry.metrics) for entry in read_journal(folder / "metrics.jsonl")]


def check_syncs(run, num_matrices=None):
    """The engine has the trainer's policy although only the adapter was sent."""
    metrics = metrics_of(run)
    assert max(entry["train/logprob_diff_max"] for entry in metrics) < 2e-5
    assert metrics[0]["train/kl"] == 0 and metrics[-1]["train/kl"] > 0
    matrices = load_file(run / "final-adapter/adapter_model.safetensors").values()
    size = sum(matrix.nbytes for matrix in matrices)
    assert num_matrices in (None, len(matrices))
    assert all(size <= entry["sync/bytes"] <= size + 16 * len(matrices) for entry in metrics)


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", LAYOUTS)
def test_an_adapter_raises_the_held_out_reward(seed, folder, tiny_model):
    """As in `test_lora.py` with trainer `fsdp`: the head is not adapted, which allows no more than 0.81."""
    ranks, layout = LAYOUTS[seed]
    train(folder, tiny_model, ranks, "run.dir=run", f"run.seed={seed}", *layout)
    evaluations = read_journal(folder / "run" / "evaluations.jsonl")
    before, after = (entry.metrics["eval/held-out/reward"] for entry in evaluations)
    assert before < 0.25
    assert after > 0.65
    check_syncs(folder / "run")


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_a_resumed_run_is_one_that_never_stopped(folder, tiny_model):
    short = ("run.batches=4", "checkpoint.every=2", "eval=[]")
    train(folder, tiny_model, 2, "run.dir=whole", "trainer.tensor_parallel=2", *short)
    shutil.copytree(folder / "whole", folder / "again")
    shutil.rmtree(folder / "again/checkpoints/batch-000004")
    train(folder, tiny_model, 2, "run.dir=again", "trainer.tensor_parallel=2", *short, "--resume")
    for ours, theirs in zip(metrics_of(folder / "again"), metrics_of(folder / "whole"), strict=True):
        assert ours["train/loss"] == theirs["train/loss"] and ours["train/kl"] == theirs["train/kl"]
    for name in ("final/model.safetensors", "final-adapter/adapter_model.safetensors"):
        assert (folder / "again" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    config = json.loads((folder / "whole/final-adapter/adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (8, str(tiny_model))


EXPERTS = (
    "run.dir=run",
    "trainer.expert_parallel=2",
    'trainer.lora={rank=8, alpha=16.0, targets=["experts.*proj"]}',
)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_adapters_of_experts_are_sent_alone(folder, tmp_path):
    train(folder, make_family(tmp_path / "moe", "Qwen3-MoE"), 2, *EXPERTS, "run.batches=2", "eval=[]")
    check_syncs(folder / "run", num_matrices=48)


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_adapters_of_experts_raise_the_held_out_reward(seed, folder, tmp_path):
    train(folder, make_family(tmp_path / "moe", "Qwen3-MoE"), 2, *EXPERTS, f"run.seed={seed}")
    before, after = (e.metrics["eval/held-out/reward"] for e in read_journal(folder / "run/evaluations.jsonl"))
    assert before < 0.25 and after > 0.6
    check_syncs(folder / "run", num_matrices=48)
