"""Runs with trainer Megatron: through `rl train` with ranks in separate processes, and resumed bit by bit."""

import json
import shutil

import pytest
from megatron_families import make_family
from plasmid_cli.comparison.runs import compare_runs
from plasmid_cli.reports.run_data import load_run

from tests.end_to_end.killed_saves import check_killed_while_saving, curve, rl
from tests.forked_rl import run_rl
from tests.vision_folders import full_model, fuse_experts, make_vision_folder

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
tensor_parallel = 2
optimizer.adam_beta2 = 0.98

[algorithm]
kind = "{algorithm}"

[checkpoint]
every = 2

[run]
batches = 4
prompts_per_batch = 4
samples_per_prompt = 4
"""


@pytest.fixture
def folder(job):
    job.plain()
    return job.folder


def write(folder, model, algorithm="grpo"):
    (folder / "digits.toml").write_text(RECIPE.format(model=model, algorithm=algorithm))


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_same_recipe_twice_gives_equal_metrics_samples_and_weights(folder, tiny_model):
    """On the CPU with `max_staleness = 0`, except times and memory: two ranks of Megatron and engine `hf`."""
    write(folder, tiny_model)
    for name in ("first", "second"):
        code, _, err = rl(folder, "train", "digits.toml", f"run.dir={name}", "run.batches=3", "checkpoint.every=1")
        assert code == 0, err
    found = compare_runs(load_run(folder / "first"), load_run(folder / "second"))
    assert (found.num_equal, found.difference, found.settings, found.environment) == (3, "", [], [])
    assert found.weights_after == 3
    tensors = [(folder / name / "final/model.safetensors").read_bytes() for name in ("first", "second")]
    assert tensors[0] == tensors[1]


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_megatron_trains_through_the_command_and_resumes_bit_by_bit(folder, tiny_model):
    write(folder, tiny_model)
    code, out, err = rl(folder, "train", "digits.toml", "run.dir=whole")
    assert code == 0, err
    assert "batch 4/4" in out
    whole = curve(folder / "whole")
    assert max(metrics["train/logprob_diff_max"] for metrics in whole) < 2e-5
    config = json.loads((folder / "whole/final/config.json").read_text())
    assert config["model_type"] == "llama" and (folder / "whole/final/model.safetensors").is_file()
    shutil.copytree(folder / "whole", folder / "again")
    shutil.rmtree(folder / "again/checkpoints/batch-000004")
    code, _, err = rl(folder, "train", "digits.toml", "run.dir=again", "--resume")
    assert code == 0, err
    assert curve(folder / "again") == whole


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("name", "model_type", "changes"),
    [
        ("GLM-4", "glm4", []),
        ("Gemma 3", "gemma3_text", []),
        ("gpt-oss", "gpt_oss", ["trainer.expert_tensor_parallel=1"]),
        ("gpt-oss", "gpt_oss", ["trainer.expert_tensor_parallel=1", "trainer.expert_parallel=2"]),
        ("Qwen3-Next", "qwen3_next", ["trainer.tensor_parallel=1", "trainer.expert_parallel=2"]),
        ("Qwen3.5", "qwen3_5_text", ["trainer.tensor_parallel=1", "trainer.pipeline_parallel=2"]),
    ],
)
def test_other_families_train_through_the_command(name, model_type, changes, folder, tmp_path):
    write(folder, make_family(tmp_path / "model", name))
    code, out, err = rl(folder, "train", "digits.toml", "run.dir=whole", "run.batches=2", *changes)
    assert code == 0, err
    assert "batch 2/2" in out
    assert max(metrics["train/logprob_diff_max"] for metrics in curve(folder / "whole")) < 2e-5
    assert json.loads((folder / "whole/final/config.json").read_text())["model_type"] == model_type


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_a_folder_with_a_vision_model_and_fused_experts_trains_through_the_command(folder, tmp_path):
    """As Qwen3.5-MoE is published."""
    write(folder, fuse_experts(make_vision_folder(tmp_path / "model", "qwen3_5_moe")))
    split = ("trainer.tensor_parallel=1", "trainer.expert_parallel=2")
    code, _, err = rl(folder, "train", "digits.toml", "run.dir=whole", "run.batches=2", *split)
    assert code == 0, err
    assert max(metrics["train/logprob_diff_max"] for metrics in curve(folder / "whole")) < 2e-5
    assert full_model(folder / "whole/final").config.model_type == "qwen3_5_moe"


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_checkpoints_of_both_trainers_convert_and_megatron_trains_on_from_its_own_format(folder, tiny_model):
    """Training from torch_dist gives the same curve as from Hugging Face, and the export equals the converted
    checkpoint."""
    write(folder, tiny_model)
    code, _, err = rl(folder, "convert", str(tiny_model), "there", "--to", "torch_dist", "to.vocab_multiple=64")
    assert code == 0, err
    for name, model in (("direct", "there"), ("plain", str(tiny_model))):
        code, _, err = rl(folder, "train", "digits.toml", f"run.dir={name}", f"model.path={model}", "run.batches=2")
        assert code == 0, err
    assert curve(folder / "direct") == curve(folder / "plain")
    code, _, err = rl(folder, "convert", "direct/checkpoints/batch-000002", "out", "--from", "torch_dist")
    assert code == 0, err
    code, out, _ = rl(folder, "convert", "--check", "out", "direct/final", "--to", "hf")
    assert (code, out) == (0, "21 tensors are equal, 0 differ\n")
    fsdp = ("run.dir=fsdp", "run.batches=2", 'trainer={kind="fsdp"}', "placement.trainer_ranks=2")
    code, _, err = rl(folder, "train", "digits.toml", *fsdp)
    assert code == 0, err
    code, out, err = rl(folder, "convert", "--check", "fsdp/checkpoints/batch-000002", "fsdp/final")
    assert (code, out) == (0, "21 tensors are equal, 0 differ\n"), err
    code, _, err = rl(folder, "train", "digits.toml", "run.dir=x", "model.path=there", "--rollouts-only")
    assert code == 2
    assert err.startswith("error: model.path: there has Megatron's distributed format, which engines do not read; ")


def test_mistakes_are_found_before_anything_starts(folder, tiny_model):
    write(folder, tiny_model)
    for change, message in (
        ("placement.trainer_ranks=3", "placement.trainer_ranks: 3 ranks cannot be split into model replicas of 2 "),
        ("trainer.transformer.moe_router_topkk=2", "moe_router_topkk is not a field of TransformerConfig"),
        ('trainer.optimizer.adam_beta2="high"', "trainer.optimizer: adam_beta2 must be float, got 'high'"),
        ("trainer.transformer.sequence_parallel=true", "sequence_parallel follows from trainer.sequence_parallel"),
        ("trainer.virtual_pipeline=2", "virtual_pipeline = 2 has no effect with pipeline_parallel = 1"),
        (
            "trainer.microbatch_tokenss=1",
            "trainer.microbatch_tokenss: no such setting; did you mean 'microbatch_tokens'?",
        ),
    ):
        done = run_rl("train", "digits.toml", change, "--dry-run", cwd=folder)
        assert done.returncode == 2 and message in done.stderr, (change, done.stderr)


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_a_run_killed_while_a_checkpoint_is_written_resumes_bit_by_bit_from_the_one_before(folder, tiny_model):
    write(folder, tiny_model)
    check_killed_while_saving(folder, "digits.toml")
