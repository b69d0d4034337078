"""The text model in a folder with a vision model: its configuration, weight names, and plan."""

import json
import math

import pytest
from plasmid.errors import DataError, ModelError
from plasmid_models.building import text_model_config
from plasmid_models.estimates.shape import ModelShape
from plasmid_models.folder import check_folder, folder_names, open_weights, tensor_names
from plasmid_models.source import check_vocabulary
from plasmid_models.text_model import FolderNames, prediction_layers, text_config
from plasmid_runtime.data.rows.prompt_rows import _message

from tests.vision_folders import NAMES, change_config, make_vision_folder

GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
}
"""The published file, which omits sizes that are defaults of transformers."""


def test_sizes_that_published_folders_leave_out_are_those_of_transformers():
    from transformers import Gemma3TextConfig

    found, default = text_config(GEMMA_3_4B), Gemma3TextConfig()
    names = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    assert {name: found[name] for name in names} == {name: getattr(default, name) for name in names}
    assert (found["torch_dtype"], found["model_type"]) == ("bfloat16", "gemma3_text")
    assert ModelShape.of(GEMMA_3_4B).parameters == 3_880_263_168


@pytest.mark.parametrize("name", NAMES)
def test_only_the_text_model_is_planned_and_loaded(name, tmp_path):
    path = make_vision_folder(tmp_path, name)
    shape = ModelShape.of(json.loads((path / "config.json").read_text()))
    with open_weights("model", path) as found:
        sizes = {name: math.prod(part.get_shape()) for name, part in found.items()}
    assert shape.parameters == sum(sizes.values())
    assert not any("vis" in name or "language_model" in name or name.startswith("mtp.") for name in sizes)


def test_the_outer_configuration_determines_whether_the_head_is_tied(tmp_path):
    path = make_vision_folder(tmp_path, "qwen3_5", tied=True)
    config = json.loads((path / "config.json").read_text())
    inner = {key: value for key, value in config["text_config"].items() if key != "tie_word_embeddings"}
    change_config(path, text_config=inner)
    assert text_config(config | {"text_config": inner})["tie_word_embeddings"] is True
    assert text_model_config(path, trust_remote_code=False).tie_word_embeddings is True


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_names_go_there_and_back(prefix, head):
    inside = {f"{prefix}layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight", head: "lm_head.weight"}
    names = FolderNames.of(GEMMA_3_4B, inside)
    assert {name: names.in_model(name) for name in inside} == inside
    assert {names.in_folder(own): own for own in inside.values()} == inside
    assert names.in_model("vision_tower.vision_model.post_layernorm.bias") is None
    assert names.in_model("model.visual.pos_embed.weight") is None
    assert names.in_transformers("model.layers.0.mlp") == "model.language_model.layers.0.mlp"


def test_further_tokens_are_predicted_by_layers_after_the_last():
    names = FolderNames.of({"num_hidden_layers": 4, "num_nextn_predict_layers": 1}, ())
    assert names.in_model("model.layers.4.enorm.weight") is None
    assert names.in_model("model.layers.40.enorm.weight") == "model.layers.40.enorm.weight"
    assert prediction_layers({"num_hidden_layers": 4}) == ()


def test_a_separate_text_model_has_the_vocabulary_of_the_folder(tmp_path, tiny_model):
    path = make_vision_folder(tmp_path, "gemma3")
    check_vocabulary("teacher", path, policy=tiny_model, tokenizer=tiny_model)
    assert folder_names("model", tiny_model) == FolderNames()
    assert "model.embed_tokens.weight" in tensor_names("model", path)


def test_the_distributed_format_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    for name in (".metadata", "metadata.json"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"its config\.json has a vision model, whose weights the format does not"):
        check_folder("model", tmp_path, torch_dist=True)


def test_images_in_prompts_are_refused():
    image = {"role": "user", "content": [{"type": "image", "url": "a.png"}, {"type": "text", "text": "What is it?"}]}
    with pytest.raises(DataError) as error:
        _message("prompt.0", image)
    assert str(error.value) == "prompt.0.content must be a string, got a list; prompts are text without images"
