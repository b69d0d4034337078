"""Plans for linear attention: weights, states, FLOPs and activations, by hand and compared with transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from plasmid import load_config
from plasmid.errors import ConfigError
from plasmid.types.estimates import BatchLoad
from plasmid_hf.model.language_model import cache_bytes, load_model
from plasmid_models.estimates.accelerators import ACCELERATORS
from plasmid_models.estimates.shape import ModelShape
from plasmid_models.linear_attention import DeltaNet, has_linear_attention, linear_layers
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.planning.plan import make_plan
from plasmid_training.estimates.activations import Activations
from plasmid_training.estimates.speed import FP32_SHARE, SCORING, compute_seconds
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[3]
NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "intermediate_size": 5120,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Qwen3-Next-80B-A3B."""
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
}
SMALL = {
    "model_type": "qwen3_5_text",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    **DELTA_NET,
}
RECIPE = """
model.path = "models/any"
data.path = "rows.jsonl"
trainer.kind = "fsdp"
algorithm.kind = "grpo"
rewards = [{ kind = "number" }]
placement = { device = "cuda", colocated = false, trainer_ranks = 8, engine_ranks = 8, offload_engine = false }
run = { prompts_per_batch = 32, samples_per_prompt = 8 }
sampling.max_new_tokens = 2048
rollout = { kind = "sglang", gpus_per_engine = 4, server_args = { mem_fraction_static = 0.7 } }
"""
LOAD = BatchLoad(samples=256, prompts=32, prompt_tokens=200, response_tokens=1000, longest=2500, steps=1)


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)

    def plan(*changes, model=NEXT, device="h200"):
        config = load_config(tmp_path / "recipe.toml", changes)
        return make_plan(config, {"model": model}, ACCELERATORS[device], LOAD)

    return plan


def test_three_of_four_layers_have_a_state_instead_of_a_cache():
    shape = ModelShape.of(NEXT)
    delta = 2048 * (2 * 2048 + 2 * 4096 + 64) + 4 * 8192 + 64 + 128 + 4096 * 2048
    full = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048 + 2 * 256
    experts = 512 * 3 * 2048 * 512 + 512 * 2048 + 3 * 2048 * 512 + 2048
    assert shape.parameters == 36 * delta + 12 * full + 48 * (experts + 2 * 2048) + 2 * 151936 * 2048 + 2048
    assert 79e9 < shape.parameters < 80e9 and 3e9 < shape.active < 4e9
    assert (shape.attending, shape.linear, shape.token_cache) == (12, 36, 12 * 2 * 2 * 256)
    assert shape.request_bytes(2) == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


def test_which_layers_are_linear():
    assert linear_layers(NEXT) == [True, True, True, False] * 12
    kinds = ["full_attention", "linear_attention"]
    assert linear_layers(NEXT | {"layer_types": kinds}) == linear_layers({"text_config": {"layer_types": kinds}})
    assert linear_layers({"layer_types": kinds}) == [False, True]
    assert not has_linear_attention({"model_type": "qwen3", "num_hidden_layers": 4})


def test_an_engine_keeps_what_was_counted(tmp_path):
    path = make_tiny_model(tmp_path / "model", family="qwen3_5_text", num_layers=4, **DELTA_NET)
    shape = ModelShape.of(json.loads((path / "config.json").read_text()))
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False)
    assert cache_bytes(model) == (4 * shape.token_cache, shape.request_bytes(4, columns=shape.net.kernel))


def delta_net(dtype, config=SMALL):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).model.layers[0].linear_attn


def test_flops_are_those_of_the_matrix_products():
    net, module = DeltaNet.of(SMALL), delta_net(torch.float32)
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(2, 128, 256))
    found = sum(count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name))
    solved = 2 * net.heads * 64 * (32 + 48) // 2  # triangular solves, which torch does not count
    convolved = 2 * net.kernel * net.convolved
    projected = 2 * 256 * (net.projected + net.values)
    assert found == 256 * (projected + net.flops - solved - convolved)


@pytest.mark.skipif(tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 19), reason="kept more")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_activations_are_those_that_autograd_keeps(dtype):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL), dtype=dtype)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, alive = {}, []

    def keep(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = torch.randn(2, 256, 256, dtype=dtype, requires_grad=True)
        model.model.layers[0](hidden, position_embeddings=None, attention_mask=None)
    shape = ModelShape.of(SMALL)
    found = Activations(shape=shape, dtype_bytes=dtype.itemsize, compiled=False).layer(2 * 256)
    assert found == pytest.approx(sum(kept.values()), rel=0.1)


def test_the_delta_rule_is_computed_in_fp32():
    shape, device = ModelShape.of(NEXT), ACCELERATORS["h200"]
    seconds = {}
    for linear in (36, 0):
        net = shape.net if linear else None
        changed = type(shape)(**{**vars(shape), "linear": linear, "layers": 12 + linear, "net": net})
        activations = Activations(shape=changed, dtype_bytes=2, compiled=True)
        seconds[linear] = compute_seconds(activations, device, tokens=1e6, sample_tokens=1e3, passes=SCORING)
    products = 2 * 64 * 128 + 64 * 256 // 2 + 64 * 128 + 3 * 128 * 128
    flops = 36 * 2 * (32 * products + 4 * 8192)
    assert seconds[36] - seconds[0] == pytest.approx(1e6 * flops / (device.fp32_flops * FP32_SHARE))


def test_a_server_keeps_states_in_the_memory_of_its_cache(plan):
    sample = plan().engine["sample"]
    pool = 0.7 * ACCELERATORS["h200"].memory - ModelShape.of(NEXT).parameters * 2 / 4
    tokens = pool / (12 * 1024 * 2 / 4)
    assert sample.memory["KV cache"] == pytest.approx(pool)
    state = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    samples = tokens // (2500 + state / (12 * 1024 * 2))
    assert sample.facts["KV cache of a server"] == f"{int(tokens):,} tokens, {samples:,.0f} longest samples"
    assert sample.facts["states of a request"] == "73.7 MiB, in the memory of the KV cache"
    small = plan("rollout.server_args.mem_fraction_static=0.27").engine["sample"]
    running = small.memory["KV cache"] / (12 * 1024 * 2 / 4) / (200 + 1000 / 2 + state / (12 * 1024 * 2))
    assert small.basis == f"2 servers x {running:.0f} requests" and running < 30
    assert small.seconds > 2 * sample.seconds, "requests wait for room for their states"


def test_nothing_of_such_a_model_is_compiled(plan):
    for kind in ("fsdp", "megatron"):
        dense = {**SMALL, "vocab_size": 151936}
        auto = plan(f"trainer.kind={kind}", model=dense).trainer["train"]
        eager = plan(f"trainer.kind={kind}", "trainer.compile=false", model=dense).trainer["train"]
        assert auto.memory == eager.memory and auto.seconds == eager.seconds


def test_recomputed_layers_are_as_large_as_the_largest(plan):
    changes = ("trainer.activation_checkpointing=true", "trainer.microbatch_tokens=16384")
    memory = plan(*changes).trainer["train"].memory
    kept = Activations(shape=ModelShape.of(NEXT), dtype_bytes=2, compiled=False)
    assert kept.linear_numbers > 2 * kept.numbers
    assert memory["one layer computed again"] == pytest.approx(16384 * kept.linear_numbers * 2)
    assert plan("trainer.microbatch_tokens=16384").trainer["train"].memory["activations"] == pytest.approx(
        16384 * 2 * (36 * kept.linear_numbers + 12 * kept.numbers)
    )


def test_ranks_do_not_split_the_tokens(plan):
    with pytest.raises(ConfigError, match=r"trainer\.context_parallel: cannot be used with linear attention"):
        plan("trainer.context_parallel=2")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_servers_keep_the_base_of_an_adapter_in_host_memory(plan, engine):
    """Figures of `benchmarks/results/adapter-sync-cpu.json`: the adapter in fp32, all weights in bfloat16."""
    model = json.loads((ROOT / "recipes/models/SmolLM2-135M-Instruct/config.json").read_text())
    rollout = f"rollout={{kind='{engine}', gpus_per_engine=4}}"
    changes = (rollout, "trainer.lora.rank=16")
    matrices = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    alone, merged = (plan(*changes, *more, model=model).engine for more in ((), ("rollout.adapter_sync=merged",)))
    sent = {"adapter": 18.6 * 2**20, "merged": 256.6 * 2**20}
    copied = 2 * matrices / 4 / 33e9
    assert alone["sync"].seconds == pytest.approx(0.02 + sent["adapter"] / 125e9 + copied, rel=1e-4)
    assert merged["sync"].seconds == pytest.approx(0.02 + sent["merged"] / 125e9, rel=1e-4)
    assert alone["sync"].basis == "adapter of 0.0 GB, base of 0.2 GB from host memory"
    assert alone["sample"].facts["host memory of a server"] == "0.2 GiB, base of the adapter"
    assert "host memory of a server" not in merged["sample"].facts
    some = plan(*changes, "trainer.lora.targets=['q_proj']", model=model).engine["sync"]
    assert some.seconds == pytest.approx(0.02 + 30 * 16 * 2 * 576 * 4 / 125e9 + 30 * 2 * 576 * 576 / 4 / 33e9, rel=1e-4)
