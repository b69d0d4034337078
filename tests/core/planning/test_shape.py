"""Weight counts computed from config.json equal those of the model that transformers builds."""

import json
from pathlib import Path

import pytest
import torch
from plasmid.errors import ConfigError
from plasmid_models.estimates.shape import FAMILIES, ModelShape
from plasmid_models.lora.insertion import insert_adapter
from plasmid_training.lora_settings import LoRASettings
from transformers import AutoConfig, AutoModelForCausalLM

DESCRIBED = sorted((Path(__file__).parents[3] / "recipes/models").glob("*/config.json"))
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
OWN = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "mlp_only_layers": [1]},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1, "use_qk_norm": True, "head_dim": 16},
    "glm4_moe_lite": {**EXPERTS, **LATENT, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
    "deepseek_v3": {**EXPERTS, **LATENT, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_next": {**EXPERTS, **DELTA_NET, "num_experts": 8, "shared_expert_intermediate_size": 40},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA_NET, "num_experts": 8, "shared_expert_intermediate_size": 40},
}


def built(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_of_each_family_has_the_weights_that_were_counted(family, changes):
    config = AutoConfig.for_model(family, **SMALL, **OWN.get(family, {}), **changes)
    shape = ModelShape.of(config.to_dict())
    assert shape.parameters == sum(p.numel() for p in built(config).parameters())


@pytest.mark.parametrize("path", DESCRIBED, ids=lambda path: path.parent.name)
def test_a_real_model_has_the_weights_that_were_counted(path):
    config = json.loads(path.read_text())
    few = {**config, "num_hidden_layers": min(5, config["num_hidden_layers"])}
    shape, model = ModelShape.of(few), built(AutoConfig.for_model(**few))
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3-4B", 4.02, 4.02),
        ("DeepSeek-R1-BF16", 671.0, 36.6),
        ("GLM-4.5", 352.8, 32.9),
        ("Qwen3-30B-A3B", 30.5, 3.0),
    ],
)
def test_known_sizes(name, billions, active):
    (path,) = (path for path in DESCRIBED if path.parent.name == name)
    shape = ModelShape.of(json.loads(path.read_text()))
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape.active / 1e9 == pytest.approx(active, rel=2e-2)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3", ()),
        ("qwen3", ("q_proj", r"layers\.[01]\..*down_proj")),
        ("qwen3_moe", ()),
        ("qwen3_moe", (r"experts\.\d+\.", "q_proj")),
        ("mixtral", (r"experts\.",)),
        ("glm4_moe", ()),
        ("glm4_moe", ("down_proj",)),
        ("qwen3_next", ()),
        ("qwen3_5_text", ("in_proj", "q_proj")),
    ],
    ids=str,
)
def test_an_adapter_has_the_weights_that_were_counted(family, targets):
    config = AutoConfig.for_model(family, **SMALL | OWN.get(family, {}))
    model = built(config)
    layers = insert_adapter(model, LoRASettings(rank=3, targets=targets).spec(), dtype=torch.float32)
    found = sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in layers.values())
    assert ModelShape.of(config.to_dict()).adapter_parameters(3, targets) == found


def test_unknown_models_are_refused():
    with pytest.raises(ConfigError, match=r"^model\.path: `rl plan` does not support model_type 'gpt2'"):
        ModelShape.of({"model_type": "gpt2"})
    with pytest.raises(ConfigError, match=r"^reference\.path: config\.json has no num_attention_heads, which"):
        ModelShape.of({"model_type": "llama", "hidden_size": 8}, where="reference.path")
