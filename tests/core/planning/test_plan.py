"""Plans of placements, and the smallest change that makes a recipe fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plasmid import load_config
from plasmid.types.estimates import BatchLoad, EstimateContext
from plasmid_models.estimates.accelerators import ACCELERATORS, find_accelerator, match_accelerator
from plasmid_runtime.planning import changes as planning_changes
from plasmid_runtime.planning.changes import find_change
from plasmid_runtime.planning.load import Lengths, batch_load, read_lengths
from plasmid_runtime.planning.plan import CONTEXT, choose_device, make_plan, read_gpu_names

GIB = 2**30
ROOT = Path(__file__).parents[3]
MODELS = {path.parent.name: json.loads(path.read_text()) for path in (ROOT / "recipes/models").glob("*/config.json")}
QWEN = MODELS["Qwen3-4B"]
RECIPE = """
model.path = "models/Qwen3-4B"
data.path = "rows.jsonl"
trainer.kind = "fsdp"
algorithm.kind = "grpo"
rewards = [{ kind = "number" }]
placement = { device = "cuda", colocated = true, offload_trainer = true, offload_engine = true }
run = { prompts_per_batch = 32, samples_per_prompt = 8 }
sampling.max_new_tokens = 2048

[rollout]
kind = "sglang"
server_args = { mem_fraction_static = 0.7 }
"""
LOAD = BatchLoad(samples=256, prompts=32, prompt_tokens=200, response_tokens=1000, longest=2500, steps=1)


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)

    def plan(*changes, device="h200", load=LOAD, models=None):
        config = load_config(tmp_path / "recipe.toml", changes)
        return make_plan(config, models or {"model": QWEN}, ACCELERATORS[device] if device else None, load)

    return plan


def trainer(made, phase="train"):
    return {name: size / GIB for name, size in made.trainer[phase].memory.items()}


def test_everything_static_is_shared_out_over_ranks(plan):
    one, four = trainer(plan()), trainer(plan("placement.trainer_ranks=4", "placement.engine_ranks=4"))
    assert one["weights"] == pytest.approx(4.0225 * 4e9 / GIB, rel=1e-3)
    assert one["optimizer"] == pytest.approx(2 * one["weights"])
    for name in ("weights", "optimizer", "gradients"):
        assert four[name] == pytest.approx(one["weights"] * (2 if name == "optimizer" else 1) / 4)
    assert four["gathered weights"] < one["weights in compute dtype"], "not the whole model at one time"
    assert four["activations"] == one["activations"], "the microbatch of a rank is as large"


def test_context_parallel_ranks_split_the_tokens_of_a_microbatch(plan):
    base = ("placement.trainer_ranks=4", "placement.engine_ranks=4", "trainer.compile=false")
    apart, split = plan(*base), plan(*base, "trainer.context_parallel=4")
    whole, parts = trainer(apart), trainer(split)
    assert parts["activations"] == pytest.approx(whole["activations"] / 4)
    assert {name: parts[name] for name in ("weights", "optimizer", "gradients")} == {
        name: whole[name] for name in ("weights", "optimizer", "gradients")
    }
    assert "split over 4 ranks" in split.trainer["train"].basis
    assert split.trainer["train"].seconds > apart.trainer["train"].seconds, "ranks exchange tokens for heads"


def test_frozen_weights_have_no_gradients_or_optimizer_state(plan):
    frozen = trainer(plan('trainer.freeze=["mlp", "embed_tokens"]'))
    assert frozen["optimizer"] == pytest.approx(
        2 * (4.0225 - 36 * 3 * 2560 * 9728e-9 - 151936 * 2560e-9) * 4e9 / GIB, 1e-3
    )
    adapter = trainer(plan("trainer.lora.rank=16"))
    assert adapter["weights"] == pytest.approx(4.0225 * 2e9 / GIB, rel=2e-2), "the base is kept in bfloat16"
    assert adapter["optimizer"] == pytest.approx(33e6 * 8 / GIB, rel=1e-2)


def test_the_optimizer_counts(plan):
    assert trainer(plan("trainer.optimizer=sgd"))["optimizer"] == 0
    momentum = trainer(plan("trainer.optimizer=sgd", "trainer.momentum=0.9"))
    assert momentum["optimizer"] == pytest.approx(momentum["weights"])


def test_recomputing_layers_costs_time_and_saves_memory(plan):
    kept, again = plan(), plan("trainer.activation_checkpointing=true")
    assert sum(trainer(again).values()) < 0.7 * sum(trainer(kept).values())
    assert 1.2 < again.trainer["train"].seconds / kept.trainer["train"].seconds < 1.4


def test_a_smaller_microbatch_takes_less(plan):
    half = trainer(plan("trainer.microbatch_tokens=8192"))["activations"]
    assert half == pytest.approx(trainer(plan())["activations"] / 2)
    longest = trainer(plan("trainer.microbatch_tokens=1000"))["activations"]
    assert longest == pytest.approx(half * 2500 / 8192), "a longer sample has a microbatch of its own"


def test_a_critic_is_a_second_trained_model(plan):
    small = {**QWEN, "num_hidden_layers": 6}
    models = {"model": QWEN, "critic": small}
    ppo = ("algorithm.kind=ppo", "run.samples_per_prompt=8")
    both, alone = plan(*ppo, models=models), plan()
    assert trainer(both)["weights"] > 1.15 * trainer(alone)["weights"]
    assert both.trainer["train"].seconds > 1.1 * alone.trainer["train"].seconds


@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_a_critic_on_dedicated_ranks_is_trained_there(plan, kind):
    small = {**QWEN, "num_hidden_layers": 6}
    settings = (f"trainer.kind={kind}", "algorithm.kind=ppo", "run.samples_per_prompt=8")
    models = {"model": QWEN, "critic": small}
    shared, dedicated = plan(*settings, models=models), plan(*settings, "placement.critic_ranks=1", models=models)
    without = plan(f"trainer.kind={kind}", "run.samples_per_prompt=8")
    assert dedicated.gpus == shared.gpus + 1 and set(dedicated.roles) == {"critic"}
    assert dedicated.trainer["train"].memory == without.trainer["train"].memory
    assert dedicated.seconds["train"] == without.seconds["train"], "the smaller critic is trained in less time"
    scored, trained = dedicated.roles["critic"]["score"], dedicated.roles["critic"]["train"]
    assert 0 < 2 * scored.seconds < trained.seconds < dedicated.seconds["train"]
    assert scored.memory["weights"] == trained.memory["weights"] and trained.memory["optimizer"]
    assert 0.15 < trained.memory["weights"] / without.trainer["train"].memory["weights"] < 0.5
    assert "logits" not in trained.memory and trained.memory["activations"] > scored.memory["activations"]
    assert dedicated.basis("train").endswith("steps of dedicated critic")
    assert plan(*settings, "placement.critic_ranks=2", models=models).roles["critic"]["train"].seconds < trained.seconds


@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_a_teacher_that_is_a_server_costs_the_trainer_nothing(plan, kind):
    opd = (f"trainer.kind={kind}", "algorithm.kind=opd", "rewards=[]")
    inside = plan(*opd, "teacher.path=auto").trainer["score"]
    served = plan(*opd, "teacher.kind=server", "teacher.url=http://host:1").trainer["score"]
    assert (inside.basis, served.basis) == ("forward passes of policy, teacher", "forward passes of policy")
    assert served.seconds == pytest.approx(inside.seconds / 2)


def test_memory_of_parts_on_one_gpu_adds_up_unless_offloaded(plan):
    names = ("placement.offload_trainer=false", "placement.offload_engine=false")
    stay = {usage.phase: usage for usage in plan(*names).usages}
    leave = {usage.phase: usage for usage in plan().usages}
    assert {usage.place for usage in stay.values()} == {"shared"}
    kept = stay["train"].total - leave["train"].total
    assert kept / GIB == pytest.approx(0.7 * 139.8 + 2.5 - 1.5, abs=0.1), "the static part of the engine"
    assert stay["sample"].total > leave["sample"].total + 40 * GIB, "weights and optimizer of the trainer"
    apart = plan("placement.colocated=false", "placement.offload_trainer=false", "placement.offload_engine=false")
    assert {usage.place for usage in apart.usages} == {"trainer", "engine"} and apart.gpus == 2
    assert stay["train"].memory["CUDA and reserve"] > 2 * CONTEXT


def test_sampling_is_bound_by_the_memory(plan):
    h200, h100 = (plan(device=name).engine["sample"].seconds for name in ("h200", "h100"))
    assert 1.1 < h100 / h200 < 1.5, "bandwidths are as 3.35 to 4.8"
    two = plan("placement.trainer_ranks=2", "placement.engine_ranks=2").engine["sample"].seconds
    assert 0.5 < two / h200 < 0.95
    few = plan("rollout.server_args.mem_fraction_static=0.1").engine["sample"]
    assert few.seconds > 1.5 * h200, "requests wait for room in the cache"


def test_vllm_has_the_same_cache_by_its_own_setting(plan):
    share = "rollout.server_args={gpu_memory_utilization=0.7}"
    vllm, sglang = plan("rollout={kind='vllm'}", share), plan()
    assert vllm.engine["sample"].memory == sglang.engine["sample"].memory
    assert vllm.engine["sample"].seconds == sglang.engine["sample"].seconds
    (obstacle,) = plan("rollout={kind='vllm'}", share.replace("0.7", "0.05")).obstacles
    assert obstacle.startswith("rollout.server_args.gpu_memory_utilization: 0.05 of 140 GiB is not enough for 7.5 GiB")


def test_batches_overlap_where_samples_may_be_stale(plan):
    apart = ("placement.colocated=false", "placement.offload_trainer=false", "placement.offload_engine=false")
    on, off = plan(*apart), plan(*apart, "run.max_staleness=1")
    parts = on.seconds
    assert on.batch_seconds == pytest.approx(sum(parts.values()))
    assert off.batch_seconds == pytest.approx(max(parts["sample"], parts["train"]) + parts["sync"])


def test_megatron_divides_what_its_ranks_share(plan):
    base = ("trainer.kind=megatron", "placement.trainer_ranks=8", "placement.engine_ranks=8")
    compiled = trainer(plan(*base))
    base += ("trainer.compile=false",)
    whole = trainer(plan(*base))
    assert compiled["activations"] < 0.8 * whole["activations"]
    assert whole["weights"] == pytest.approx(4.0225 * 2e9 / GIB, rel=1e-3)
    assert whole["optimizer"] == pytest.approx(4.0225 * 12e9 / 8 / GIB, rel=1e-3), "over the data-parallel ranks"
    tensors = trainer(plan(*base, "trainer.tensor_parallel=4"))
    assert tensors["weights"] == pytest.approx(whole["weights"] / 4, rel=1e-2)
    assert tensors["activations"] == pytest.approx(whole["activations"] / 4)
    stages = trainer(plan(*base, "trainer.pipeline_parallel=4"))
    assert whole["weights"] / 4 < stages["weights"] < whole["weights"] / 2, "embeddings lie on two stages"


def test_an_adapter_of_megatron_leaves_the_base_without_gradients(plan):
    base = ("trainer.kind=megatron", "placement.trainer_ranks=8", "placement.engine_ranks=8", "trainer.lora.rank=16")
    whole, tensors = trainer(plan(*base)), trainer(plan(*base, "trainer.tensor_parallel=4"))
    assert whole["weights"] == pytest.approx((4.0225 * 2e9 + 33e6 * 4) / GIB, rel=1e-2)
    assert whole["gradients"] == pytest.approx(33e6 * 4 / GIB, rel=1e-2)
    assert whole["optimizer"] == pytest.approx(33e6 * 8 / 8 / GIB, rel=1e-2)
    assert tensors["gradients"] == pytest.approx(whole["gradients"] / 4)


def test_experts_are_shared_out_by_themselves(plan):
    models = {"model": MODELS["Qwen3-30B-A3B"]}
    base = (
        "trainer.kind=megatron",
        "placement.trainer_ranks=8",
        "placement.engine_ranks=8",
        "rollout.gpus_per_engine=4",
    )
    some, all_ = (trainer(plan(*base, f"trainer.expert_parallel={n}", models=models))["weights"] for n in (8, 1))
    assert all_ == pytest.approx(30.53 * 2e9 / GIB, rel=1e-2)
    assert some == pytest.approx((1.54 + 28.99 / 8) * 2e9 / GIB, rel=2e-2)


def test_adapters_of_experts_are_shared_out_as_the_experts(plan):
    models = {"model": MODELS["Qwen3-30B-A3B"]}
    base = ("trainer.kind=megatron", "placement.trainer_ranks=8", "placement.engine_ranks=8")
    lora = "trainer.lora={rank=16, targets=['experts.*proj']}"
    some, all_ = (trainer(plan(*base, lora, f"trainer.expert_parallel={n}", models=models)) for n in (8, 1))
    assert all_["gradients"] == pytest.approx(830e6 * 4 / GIB, rel=1e-2)
    assert some["gradients"] == pytest.approx(all_["gradients"] / 8)
    assert some["optimizer"] == all_["optimizer"] == pytest.approx(830e6 * 8 / 8 / GIB, rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "device", "settings"),
    [
        (("trainer.microbatch_tokens=8192",), "h200", None),
        ((), "h200", ("trainer.microbatch_tokens=8192",)),
        (
            ("placement.offload_engine=false", "trainer.microbatch_tokens=4096"),
            "h200",
            ("placement.offload_engine=true",),
        ),
        (
            ("trainer.microbatch_tokens=4096", "rollout.server_args.mem_fraction_static=0.05"),
            "h200",
            ("rollout.server_args.mem_fraction_static=0.2",),
        ),
        ((), "h100", ("trainer.cpu_offload=true",)),
    ],
)
def test_the_smallest_change_that_fits_is_found(plan, changes, device, settings):
    load = replace(LOAD, longest=4000)
    made = plan(*changes, device=device, load=load)
    if settings is None:
        assert made.fits
        return
    assert not made.fits
    change = find_change(made, lambda config: make_plan(config, {"model": QWEN}, ACCELERATORS[device], load))
    assert change.settings == settings
    assert plan(*changes, *change.settings, device=device, load=load).fits, "it is what the user would type"


def test_where_nothing_helps_there_is_no_change(plan, monkeypatch):
    monkeypatch.setattr(planning_changes, "MAX_SETTINGS", 1)  # the number of combinations grows exponentially with it
    models = {"model": MODELS["DeepSeek-R1-BF16"]}
    made = plan(device="l4", models=models)
    assert find_change(made, lambda config: make_plan(config, models, ACCELERATORS["l4"], LOAD)) is None


def test_a_trainer_that_gives_no_estimate_is_left_out(plan):
    from plasmid.testing import fakes

    made = plan("trainer={kind='fake'}", f"plugins=['{fakes.__file__}']")
    assert made.trainer == {} and made.batch_seconds is None and made.engine


CPU = ("placement={device='cpu'}", "trainer.dtype='bfloat16'")


def test_a_single_rank_on_a_cpu_keeps_copies_instead_of_gathering(plan):
    made = plan(*CPU, device=None)
    for phase in ("idle", "train", "sync"):
        memory = trainer(made, phase)
        assert memory["weights in compute dtype"] == pytest.approx(memory["weights"] / 2)
        assert memory["gradient sums"] == memory["weights"]
        assert not memory.keys() & {"gathered weights", "gradients", "frozen models", "checkpoint being written"}
    exact = trainer(plan(CPU[0], device=None))
    assert exact["gradients"] == exact["weights"]
    assert not exact.keys() & {"gathered weights", "weights in compute dtype", "gradient sums"}
    sharded = trainer(plan("placement={device='cpu', trainer_ranks=2}", CPU[1], device=None))
    assert {"gathered weights", "gradients"} < sharded.keys() and "weights in compute dtype" not in sharded


def test_a_single_gpu_copies_the_weights_that_are_not_in_the_compute_dtype(plan):
    whole, adapter = trainer(plan()), trainer(plan("trainer.lora={rank=16}"))
    assert whole["weights in compute dtype"] == pytest.approx(whole["weights"] / 2)
    assert "weights in compute dtype" not in trainer(plan(), "idle")
    assert adapter["weights in compute dtype"] * GIB == 2 * 33030144
    offloaded = trainer(plan("trainer.cpu_offload=true"))
    assert "gathered weights" in offloaded and "weights in compute dtype" not in offloaded


def test_an_adapter_on_a_cpu_has_copies_of_its_own_weights_only(plan):
    memory = trainer(plan(*CPU, "trainer.lora={rank=16}", "algorithm.kl_coef=0.1", device=None))
    assert memory["weights in compute dtype"] * GIB == memory["gradient sums"] * GIB / 2 == 2 * 33030144
    assert "frozen models" not in memory, "the policy without its adapter"


def test_models_and_checkpoints_that_a_gpu_keeps_on_the_host_count_on_a_cpu(plan):
    changes = ("algorithm.kl_coef=0.1", "trainer.async_save=true", "checkpoint.every=10")
    assert not trainer(plan(*changes)).keys() & {"frozen models", "checkpoint being written"}
    memory = trainer(plan(*CPU, *changes, device=None))
    assert memory["frozen models"] == memory["weights"] / 2
    assert memory["checkpoint being written"] == memory["weights"] + memory["optimizer"]
    moving = trainer(plan(*CPU, *changes, "reference.update_every=1", "checkpoint.optimizer=false", device=None))
    assert moving["frozen models"] == moving["checkpoint being written"] == moving["weights"]
    assert "checkpoint being written" not in trainer(plan(*CPU, *changes, "checkpoint.every=0", device=None))


def test_lengths_are_those_of_the_data_or_assumed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config("recipes/smollm2-sums-cpu.toml")
    model = MODELS["SmolLM2-135M-Instruct"]
    load, assumed = batch_load(config, model, Lengths())
    assert (load.prompt_tokens, load.response_tokens) == (256, 2) and len(assumed) == 2
    load, _ = batch_load(config, model, Lengths(prompt=100, response=3))
    assert (load.tokens, load.samples, load.longest) == (64 * 103, 64, 203)
    long = load_config("recipes/smollm2-sums-cpu.toml", ["model.max_length=64"])
    assert batch_load(long, model, Lengths(prompt=40))[0].longest == 64
    if Path(config.model.path).is_dir():
        read = read_lengths(config, Lengths())
        assert 4 <= read.prompt <= read.longest_prompt <= 30 and read.read == 64
    assert read_lengths(load_config("recipes/qwen3-4b-reasoning-8gpus.toml"), Lengths(prompt=7)) == Lengths(prompt=7)


def test_gpus_are_recognised_by_driver_name(tmp_path, plan):
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0/information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    assert read_gpu_names(tmp_path) == ["NVIDIA H100 80GB HBM3"] and read_gpu_names(tmp_path / "none") == []
    names = {"NVIDIA H200": "h200", "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA GeForce RTX 4090": "rtx4090"}
    assert {name: match_accelerator(name).name for name in names} == names
    assert match_accelerator("NVIDIA GeForce GTX 1080") is None
    assert choose_device(plan().config, "A100")[0] is find_accelerator("a100")
    assert choose_device(plan("placement={device='cpu'}").config, None)[0] is None


def test_estimates_are_made_of_plain_numbers(plan):
    context = EstimateContext(config=plan().config, models={"model": QWEN}, device=ACCELERATORS["h100"], load=LOAD)
    for part in (context.config.trainer, context.config.rollout):
        for phase in part.estimate(context):
            assert phase.total >= 0 and all(size >= 0 for size in phase.memory.values())
