"""Settings that are rejected before any process starts and without importing Megatron."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from plasmid.config.load import validate
from plasmid.errors import ConfigError
from plasmid_megatron.settings import Megatron
from plasmid_megatron.shapes import check_split, layers_of_stages
from plasmid_megatron.upstream.fields import fields

ROOT = Path(__file__).parents[2]


def mistake(**settings):
    with pytest.raises(ConfigError) as error:
        validate(Megatron, {"kind": "megatron", **settings}, "trainer")
    return str(error.value)


FIELDS = """
import subprocess, sys
from plasmid_megatron.upstream.fields import fields
from plasmid_megatron.upstream.imports import import_without_compiler

if "import" in sys.argv:
    with import_without_compiler():
        import megatron.core.optimizer
    subprocess.run = None
assert len(fields()["transformer"]) > 150
assert ("torch" in sys.modules) == ("import" in sys.argv)
"""


@pytest.mark.parametrize("how", ["import", "subprocess"])
def test_fields_are_read_in_a_process_that_has_imported_megatron_or_in_another_and_cached(tmp_path, how):
    """The first conversion on a machine imported Megatron a second time: 12 to 19 s with GPUs."""
    command, places = [sys.executable, "-W", "ignore", "-c", FIELDS, how], {"XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run(command, env=os.environ | places, check=True)
    (cached,) = (tmp_path / "plasmid").iterdir()
    assert json.loads(cached.read_text()) == fields()


def test_fields_of_megatron_are_taken_by_name_and_type():
    transformer = {"recompute_granularity": "full", "recompute_num_layers": 1, "moe_aux_loss_coeff": 0.01}
    optimizer = {"adam_beta2": 0.98, "optimizer": "adam", "exp_avg_dtype": "float32"}
    settings = Megatron(transformer=transformer, optimizer=optimizer)
    assert (settings.transformer, settings.optimizer) == (transformer, optimizer)
    assert len(fields()["transformer"]) > 150 and fields()["optimizer"]["adam_eps"] == ["float"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transformer": {"num_layer": 2}}, "num_layer is not a field of TransformerConfig of megatron-core"),
        ({"transformer": {"num_layer": 2}}, "; did you mean 'num_layers'?"),
        ({"transformer": {"recompute_num_layers": "one"}}, "recompute_num_layers must be int, got 'one'"),
        ({"transformer": {"recompute_granularity": True}}, "must be 'full' or 'selective', got True"),
        (
            {"transformer": {"activation_func": "gelu"}},
            "activation_func takes a function or an object, which",
        ),
        ({"transformer": {"context_parallel_size": 2}}, "follows from trainer.context_parallel; set that"),
        ({"transformer": {"hidden_dropout": 0.1}}, "hidden_dropout cannot be set: trainer 'megatron' trains without"),
        ({"optimizer": {"lr": 1e-5}}, "trainer.optimizer: lr follows from trainer.lr; set that"),
        ({"overlap_param_gather": True}, "overlap_param_gather needs overlap_grad_reduce = true"),
        (
            {"overlap_grad_reduce": True, "overlap_param_gather": True, "distributed_optimizer": False},
            "overlap_param_gather has no effect with distributed_optimizer = false; remove it",
        ),
        ({"optimizer": {"overlap_param_gather": True}}, "overlap_param_gather follows from trainer.overlap_param_gath"),
        (
            {"optimizer": {"overlap_param_gather_with_optimizer_step": True}},
            "overlap_param_gather_with_optimizer_step cannot be set: trainer 'megatron' gathers parameters in the",
        ),
        ({"optimizer": {"optimizer": "sgd"}}, "distributed_optimizer works with optimizer = 'adam' only"),
        ({"virtual_pipeline": 2}, "virtual_pipeline = 2 has no effect with pipeline_parallel = 1"),
        ({"sequence_parallel": True}, "sequence_parallel has no effect with tensor_parallel = 1"),
        ({"min_lr_fraction": 0.1}, "min_lr_fraction has no effect with schedule = 'constant'"),
        ({"microbatch_samples": 2, "microbatch_tokens": 10}, "microbatch_tokens has no effect"),
        ({"transformer_engine": True}, "transformer_engine = true needs dtype = 'bfloat16'"),
        (
            {"transformer_engine": True, "dtype": "bfloat16", "compile": True},
            "compile = true needs transformer_engine = f",
        ),
        (
            {"transformer_engine": True, "dtype": "bfloat16", "lora": {}},
            "lora needs transformer_engine = false: layers of TransformerEngine cannot have an adapter",
        ),
        (
            {"transformer": {"moe_shared_expert_overlap": True}, "lora": {}},
            "lora needs transformer.moe_shared_expert_overlap = false",
        ),
        (
            {"activation_memory_budget": 0.5, "transformer": {"recompute_granularity": "selective"}},
            "activation_memory_budget has no effect with transformer.recompute_granularity; remove one of them",
        ),
        ({"activation_memory_budget": 0.5, "compile": False}, "activation_memory_budget needs compiled layers"),
        ({"lora": {}, "freeze": ["mlp"]}, "freeze has no effect with lora, which trains only the adapter; remove it"),
        ({"transformer": {"moe_grouped_gemm": True}}, "transformer.moe_grouped_gemm = true needs transformer_engine"),
        ({"transformer": {"transformer_impl": "local"}}, "transformer_impl follows from trainer.transformer_engine"),
        ({"transformer": {"mtp_num_layers": 1}}, "mtp_num_layers cannot be set: trainer 'megatron' does not"),
        (
            {"transformer": {"softmax_type": "off-by-one"}},
            "softmax_type cannot be set: trainer 'megatron' takes attention sinks from the model",
        ),
        ({"transformer": {"fp8": "e4m3"}}, "fp8 cannot be set: trainer 'megatron' computes in float32 or bfloat16"),
    ],
)
def test_errors_name_the_setting_and_the_fix(settings, message):
    assert message in mistake(**settings)


def test_ranks_make_model_replicas():
    assert Megatron(tensor_parallel=2, pipeline_parallel=2).num_parts(8) == 2
    with pytest.raises(ValueError, match="6 ranks cannot be split into model replicas of 4 "):
        Megatron(tensor_parallel=2, pipeline_parallel=2).num_parts(6)
    with pytest.raises(ValueError, match="6 ranks cannot be split into expert-parallel groups of 4 "):
        Megatron(expert_parallel=4).num_parts(6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor_parallel": 3},
            "num_attention_heads = 4 cannot be split into 3 parts (tensor_parallel x context_para",
        ),
        ({"tensor_parallel": 4}, "num_key_value_heads = 2 cannot be split into 4 parts (tensor_parallel)"),
        ({"pipeline_parallel": 2, "virtual_pipeline": 2}, "num_hidden_layers = 2 cannot be split into 4 parts"),
        (
            {"expert_parallel": 2},
            "expert_parallel: the model has 0 experts, which cannot be split over 2 ranks",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_named(settings, message, tiny_model):
    config = json.loads((tiny_model / "config.json").read_text())
    with pytest.raises(ConfigError) as error:
        check_split(Megatron(**settings), config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model.path: model type 'gpt2' is not supported by trainer 'megatron'; supported types are deepseek_v3, "
            "gemma3_text, glm4, glm4_moe, glm4_moe_lite, gpt_oss, llama, qwen2, qwen3, qwen3_5_moe_text, qwen3_5_text, "
            "qwen3_moe, qwen3_next",
        ),
        (
            {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}},
            "model.path: the model's weights are quantized (fp8); only fp8 with weight_block_size and mxfp4 can be "
            "read: use a copy in bfloat16",
        ),
        (
            {"num_hidden_layers": 61},
            "trainer: the model's num_hidden_layers = 61 cannot be split into 2 parts (pipeline_parallel x "
            "virtual_pipeline); set transformer.num_layers_in_last_pipeline_stage for an uneven split",
        ),
        (
            {"n_routed_experts": 8},
            "trainer.sequence_parallel: must be true with experts and tensor_parallel > 1; remove the setting",
        ),
    ],
)
def test_a_model_that_megatron_does_not_train_is_refused(model, message):
    with pytest.raises(ConfigError) as error:
        check_split(Megatron(pipeline_parallel=2, tensor_parallel=2, sequence_parallel=False), model)
    assert str(error.value) == message


def test_latent_attention_gets_no_adapter():
    check_split(Megatron(), {"kv_lora_rank": 16})
    with pytest.raises(ConfigError) as error:
        check_split(Megatron(lora={}), {"kv_lora_rank": 16})
    assert str(error.value) == (
        "trainer.lora: trainer 'megatron' cannot train an adapter of a model with latent attention (MLA); use trainer "
        "'fsdp', or remove the table"
    )


EXPERTS = {"num_experts": 4, "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16, "num_attention_heads": 2}
EXPERTS |= {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "intermediate_size": 8, "mlp_only_layers": [0]}


@pytest.mark.parametrize("target", ["down_proj", r"mlp\.experts\.\d+\.up_proj", "mlp"])
def test_adapters_of_experts_that_megatron_cannot_train_are_refused(target):
    for allowed in ({}, {"targets": ["q_proj"]}, {"targets": [r"layers\.0\..*down_proj"]}):
        check_split(Megatron(tensor_parallel=2, lora=allowed), EXPERTS)
    lora = {"targets": ["q_proj", target]}
    check_split(Megatron(tensor_parallel=2, expert_tensor_parallel=1, lora=lora), EXPERTS)
    with pytest.raises(ConfigError) as error:
        check_split(Megatron(tensor_parallel=2, lora=lora), EXPERTS)
    assert str(error.value) == (
        "trainer.expert_tensor_parallel: must be 1 for adapters of routed experts, got 2; set it to 1, and split "
        "experts with expert_parallel"
    )
    with pytest.raises(ConfigError) as error:
        check_split(Megatron(lora=lora), EXPERTS | {"model_type": "gpt_oss"})
    assert str(error.value) == (
        "trainer.lora.targets: match routed experts, which have biases in model type 'gpt_oss' and cannot have an "
        "adapter; narrow the patterns"
    )


def test_layers_with_experts_are_not_compiled():
    check_split(Megatron(), {"num_experts": 8})
    with pytest.raises(ConfigError, match="layers with experts cannot be compiled, and the model has 8; remove"):
        check_split(Megatron(compile=True), {"num_experts": 8})


def test_the_last_stage_can_have_fewer_layers():
    uneven = Megatron(pipeline_parallel=4, transformer={"num_layers_in_last_pipeline_stage": 13})
    assert layers_of_stages(uneven, {"num_hidden_layers": 61}) == [16, 16, 16, 13]
    with pytest.raises(ConfigError, match="with 16 in the first and 13 in the last"):
        check_split(uneven, {"num_hidden_layers": 62})


def test_neither_listing_nor_starting_imports_torch_or_megatron():
    code = (
        "import sys, plasmid_megatron.plugin as p, plasmid_megatron.trainer; p.register_components();"
        "print([m for m in ('torch', 'megatron', 'mbridge', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_cpu_without_support_is_refused(monkeypatch):
    from plasmid_megatron import device

    monkeypatch.setattr(device, "GROUP", "plasmid_megatron.nobody_registers_here")
    with pytest.raises(ConfigError, match=r"trainer.kind: 'megatron' needs GPUs, but the trainer is placed on the CPU"):
        device.check_device("cpu")
    device.check_device("cuda")


def test_a_recipe_with_fields_of_megatron_is_checked_offline_without_megatron(tmp_path, monkeypatch, capsys):
    from plasmid_cli.main import app

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("plasmid_megatron.upstream.fields.version", missing)
    monkeypatch.setattr("plasmid.components.base.find_spec", lambda name: None if name == "megatron.core" else name)
    monkeypatch.chdir(ROOT)
    argv = ["train", "recipes/glm-4-9b-reasoning-8gpus.toml", "trainer.transformer.recompute_granularity='full'"]
    with pytest.raises(SystemExit) as stopped:
        app([*argv, "--dry-run", "--offline"])
    assert (stopped.value.code or 0, capsys.readouterr().err) == (0, "")
    with pytest.raises(SystemExit) as stopped:
        app([*argv, f"model.path={tmp_path}", "--dry-run"])
    assert stopped.value.code == 2
    expected = "error: trainer.kind: 'megatron' needs the package megatron.core; pip install 'plasmid-megatron'"
    assert expected in capsys.readouterr().err.splitlines()
