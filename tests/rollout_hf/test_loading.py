"""Several engines of one process read their models at the same time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from plasmid.errors import ModelError
from plasmid_hf.model.language_model import load_model
from plasmid_models.testing import make_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM


def test_models_that_threads_load_at_once_are_whole_and_keep_their_precision(tmp_path):
    path = make_tiny_model(tmp_path / "model", tied=True)
    kinds = [torch.float32, torch.bfloat16] * 20

    def load(dtype):
        return load_model(path, dtype=dtype, device=torch.device("cpu"), trust_remote_code=False)

    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(load, kinds))
    assert [model.hf.lm_head.weight.dtype for model in models] == kinds
    assert all(model.hf.lm_head.weight is model.hf.get_input_embeddings().weight for model in models)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_models_with_linear_attention_are_refused(family, tmp_path):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    sizes |= {"num_key_value_heads": 1, "vocab_size": 64, "linear_num_value_heads": 2, "linear_num_key_heads": 2}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16}
    config = AutoConfig.for_model(family, **sizes, **(experts if family == "qwen3_next" else {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    said = "has layers of kind 'linear_attention', which engine 'hf' does not support; choose another model or"
    with pytest.raises(ModelError, match=said):
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False)
