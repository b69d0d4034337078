"""Adapters that would be read incorrectly or not at all, and models that cannot have an adapter, are refused."""

import json

import pytest
import torch
from fsdp_cases import make_config
from plasmid.components import AdapterSpec
from plasmid.errors import CheckpointError, ConfigError, ModelError
from plasmid_fsdp.model.adapter import ShardedAdapter
from plasmid_models.lora.insertion import insert_adapter
from plasmid_models.lora.peft_folder import CONFIG, WEIGHTS, check_adapter
from plasmid_models.source import Source
from plasmid_runtime.checkpoint.folder import check_same_config
from plasmid_runtime.lifecycle.validation import check
from plasmid_training.lora_settings import LoRASettings
from torch import float32
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

SPEC = AdapterSpec(rank=3, alpha=6.0, targets=())


def adapter_folder(folder, **config):
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6} | config))
    (folder / WEIGHTS).touch()
    return folder


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", ["gaussian"]])
def test_an_adapter_of_a_changed_base_is_refused(init, tmp_path):
    with pytest.raises(
        ModelError, match=r"init_lora_weights = .*, which changes the base model; convert the "
    ) as error:
        check_adapter(adapter_folder(tmp_path, init_lora_weights=init), SPEC)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_an_adapter_of_the_base_itself_is_taken(init, tmp_path):
    check_adapter(adapter_folder(tmp_path, init_lora_weights=init), SPEC)


def test_an_adapter_that_is_gone_need_not_be_there_to_continue_a_run(tiny_model, tmp_path):
    lora = {"rank": 3, "alpha": 6.0, "start_from": str(tmp_path / "gone")}
    config = make_config(tiny_model, trainer={"lora": lora})
    with pytest.raises(ModelError, match=r", or none to continue a run from its checkpoint$"):
        config.trainer.check(config.view("trainer"))
    without = make_config(tiny_model, trainer={"lora": lora | {"start_from": "none"}})
    without.trainer.check(without.view("trainer"))
    check_same_config(config.model_dump(mode="json"), without)
    with pytest.raises(CheckpointError, match=r"^trainer\.lora\.rank: must not change on resume, was 3"):
        check_same_config(config.model_dump(mode="json"), make_config(tiny_model, trainer={"lora": lora | {"rank": 4}}))


def test_an_adapter_that_nothing_would_read_is_refused(tiny_model, tmp_path):
    lora = {"rank": 3, "alpha": 6.0, "start_from": str(adapter_folder(tmp_path))}
    message = (
        "trainer.lora.start_from: has no effect without a trainer; export the run and set model.path to the merged "
        "folder"
    )
    unused = ("data", "rewards", "trainer")
    config = make_config(tiny_model, trainer={"lora": lora})
    with pytest.raises(ConfigError) as error:
        check(config, training=False, unused=unused)
    assert str(error.value) == message
    check(make_config(tiny_model, trainer={"lora": lora | {"start_from": "none"}}), training=False, unused=unused)


@pytest.mark.parametrize("targets", [(), ("c_attn",)])
def test_a_model_without_plain_linear_layers_gets_no_adapter(targets):
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    message = "trainer.lora: the model has no plain linear layers except its head; train without an adapter"
    with pytest.raises(ModelError) as error:
        insert_adapter(lm, AdapterSpec(rank=3, alpha=6.0, targets=targets), dtype=float32)
    assert str(error.value) == message


def test_a_model_whose_decoder_is_not_known_needs_targets(tiny_model):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model)
    lm._no_split_modules = None
    with pytest.raises(ModelError, match=r"^trainer\.lora\.targets: .* set patterns, for example model\.layers\.0\."):
        insert_adapter(lm, SPEC, dtype=float32)
    assert len(insert_adapter(lm, AdapterSpec(rank=3, alpha=6.0, targets=("q_proj",)), dtype=float32)) == 2


def test_the_first_layers_input_requires_a_gradient_like_that_of_the_others(tiny_model):
    """Otherwise `torch.compile` would need more graphs. A long test counts the captured graphs."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_model)
    ShardedAdapter(lm, LoRASettings(rank=3, alpha=6.0), Source(where="model", path=tiny_model, trust_remote_code=False))
    embedding, ids = lm.get_input_embeddings(), torch.arange(7, 12)[None]
    assert embedding(ids).requires_grad
    with torch.no_grad():
        assert not embedding(ids).requires_grad
