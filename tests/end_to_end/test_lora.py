"""Whole runs that train an adapter: it learns, only the adapter is sent, and resume is exact."""

import json

import pytest
from megatron_families import make_family
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.export import export_checkpoint
from safetensors.torch import load_file

LORA = {"lr": 2e-2, "lora": {"rank": 8, "alpha": 16.0}}


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_adapter_raises_the_held_out_reward(job, seed):
    """The head is not adapted, and no hidden state with this base's norm gives digits a probability above 0.81."""
    loop = {"seed": seed, "batches": 30, "prompts_per_batch": 4, "samples_per_prompt": 8}
    result = job.run({"run": loop, "trainer": LORA, "algorithm": {"kl_coef": 0.001}})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert before < 0.25
    assert after > 0.65
    metrics = job.metrics()
    assert max(m["train/logprob_diff_max"] for m in metrics) < 2e-5
    assert metrics[0]["train/kl"] == 0 and metrics[-1]["train/kl"] > 0
    matrices = load_file(job.folder / "run" / "final-adapter" / "adapter_model.safetensors").values()
    padding = 16 * len(matrices)
    size = sum(matrix.nbytes for matrix in matrices)
    assert all(size <= m["sync/bytes"] <= size + padding for m in metrics)


EXPERTS = {"rank": 4, "alpha": 8.0, "targets": [r"experts\.\d+\.(gate|up|down)_proj"]}


def of_experts(job):
    """The job with a mixture of experts."""
    job.model = make_family(job.folder / "moe", "Qwen3-MoE")
    return {"lr": 2e-2, "lora": EXPERTS}


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_adapters_of_experts_raise_the_held_out_reward(job, seed):
    loop = {"seed": seed, "batches": 30, "prompts_per_batch": 4, "samples_per_prompt": 8}
    result = job.run({"run": loop, "trainer": of_experts(job)})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert before < 0.25
    assert after > 0.6


def test_a_run_with_expert_adapters_sends_only_the_adapters(job):
    job.run({"trainer": of_experts(job), "algorithm": {"kl_coef": 0.01}, "run": {"batches": 2}, "eval": []})
    metrics = job.metrics()
    assert max(m["train/logprob_diff_max"] for m in metrics) < 2e-5
    assert metrics[0]["train/kl"] == 0 < metrics[-1]["train/kl"]
    matrices = load_file(job.folder / "run/final-adapter/adapter_model.safetensors")
    assert len(matrices) == 2 * 4 * 3 * 2 and all(".mlp.experts." in name for name in matrices)
    size = sum(matrix.nbytes for matrix in matrices.values())
    assert all(size <= m["sync/bytes"] <= size + 16 * len(matrices) for m in metrics)
    base, final = load_file(job.model / "model.safetensors"), load_file(job.folder / "run/final/model.safetensors")
    assert {name for name in base if not base[name].equal(final[name])} == {n for n in base if ".mlp.experts." in n}


@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_resumed_run_and_its_export_are_those_of_one_that_never_stopped(job, experts):
    trainer = of_experts(job) if experts else LORA
    changes = {"trainer": trainer, "algorithm": {"kl_coef": 0.01}, "checkpoint": {"every": 2}, "eval": []}
    job.run(changes | {"run": {"batches": 3}})
    whole = job.metrics()
    run = job.folder / "run"
    other = {"dir": str(job.folder / "other"), "batches": 2}
    job.run(changes | {"run": other})
    job.run(changes | {"run": other | {"batches": 3}}, resume=True)
    for ours, theirs in zip(job.metrics("other"), whole, strict=True):
        assert ours["train/loss"] == theirs["train/loss"] and ours["train/kl"] == theirs["train/kl"]
    target = job.folder / "exported"
    export_checkpoint(job.folder / "other", target, trust_recipe=True, make_cluster=lambda _: LocalCluster())
    for name, file in (("", "model.safetensors"), ("-adapter", "adapter_model.safetensors")):
        exported = load_file(target.with_name(f"exported{name}") / file)
        final = load_file(run / f"final{name}" / file)
        assert exported.keys() == final.keys()
        assert all((exported[key] == final[key]).all() for key in final)
    config = json.loads((job.folder / "exported-adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (trainer["lora"]["rank"], str(job.model))
