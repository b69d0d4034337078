"""What is offloaded from a GPU that trainer and engine share."""

import json
from pathlib import Path

import pytest
from plasmid import load_config
from plasmid.types.estimates import BatchLoad
from plasmid_models.estimates.accelerators import ACCELERATORS
from plasmid_runtime.planning import offload
from plasmid_runtime.planning.offload import choose_offload, resolve_offload
from plasmid_runtime.planning.plan import make_plan

MODELS = Path(__file__).parents[3] / "recipes/models"
LOAD = BatchLoad(samples=256, prompts=32, prompt_tokens=200, response_tokens=1000, longest=2500, steps=1)
RECIPE = """
model.path = "{model}"
data.path = "rows.jsonl"
trainer.kind = "fsdp"
algorithm.kind = "grpo"
rewards = [{{ kind = "number" }}]
placement = {{ device = "cuda", colocated = true }}
run = {{ prompts_per_batch = 32, samples_per_prompt = 8 }}
sampling.max_new_tokens = 2048
rollout = {{ kind = "sglang", server_args = {{ mem_fraction_static = 0.4 }} }}
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=MODELS / "Qwen3-4B"))
    return lambda *changes: load_config(tmp_path / "recipe.toml", changes)


def moved(config):
    return config.placement.offload_trainer, config.placement.offload_engine


@pytest.mark.parametrize(
    ("changes", "device", "expected", "reason"),
    [
        (
            ("trainer.lora.rank=16", "trainer.microbatch_tokens=2048"),
            "h200",
            (False, False),
            "of 140 GiB in use according to the plan",
        ),
        (
            ("trainer.microbatch_tokens=2048", "rollout.server_args.mem_fraction_static=0.35"),
            "h200",
            (False, True),
            "of 1",
        ),
        ((), "h200", (True, True), "offloading less would leave too little free memory"),
        (
            ("placement.offload_engine=false",),
            "h200",
            (True, False),
            "offloading less would leave too little free memory",
        ),
        (("placement.colocated=false",), "h200", (False, False), ""),
        ((), None, (False, False), ""),
    ],
)
def test_only_what_does_not_fit_is_moved(recipe, changes, device, expected, reason):
    models = {"model": json.loads((MODELS / "Qwen3-4B/config.json").read_text())}
    gpu = ACCELERATORS[device] if device else None
    chosen, why = choose_offload(recipe(*changes), lambda config: make_plan(config, models, gpu, LOAD))
    assert (moved(chosen), reason in why) == (expected, True), why


@pytest.mark.parametrize(
    ("names", "changes", "expected", "reason"),
    [
        (["NVIDIA H200"], (), (True, True), "offloading less would leave too little free memory"),
        (["NVIDIA H200"], ("placement.device=cpu",), (False, False), ""),
        (["NVIDIA H200"], ("placement.offload_trainer=true", "placement.offload_engine=true"), (True, True), ""),
        (["NVIDIA T1000"], (), (True, True), "the memory of the GPUs is unknown here"),
        ([], (), (True, True), "the memory of the GPUs is unknown here"),
        ([], ("placement.device=auto",), (False, False), ""),
        (
            ["NVIDIA H200"],
            ("model.path=./models/none",),
            (True, True),
            "there is no plan: model.path: no such folder: ",
        ),
    ],
)
def test_a_run_chooses_by_the_gpus_of_this_machine(recipe, names, changes, expected, reason, monkeypatch):
    monkeypatch.setattr(offload, "read_gpu_names", lambda: names)
    chosen, why = resolve_offload(recipe(*changes))
    assert moved(chosen) == expected and why.startswith(reason) and bool(why) == bool(reason)
    assert resolve_offload(chosen) == (chosen, ""), "it is chosen once"
