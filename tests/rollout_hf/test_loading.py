"""Several engines of one process load their models at the same time."""

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


def test_models_with_layers_of_another_kind_are_refused(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("lfm2", **sizes)).save_pretrained(tmp_path)
    said = "has layers of kind 'conv', which engine 'hf' does not support; choose another model or"
    with pytest.raises(ModelError, match=said):
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False)
