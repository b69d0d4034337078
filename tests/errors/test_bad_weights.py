"""Models and checkpoints that turn out not to fit only when they are loaded: one line, and the run folder is
released."""

import json
import shutil
from pathlib import Path

import pytest
from plasmid.errors import ModelError
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.observe.progress import STARTING

SMALL = [
    "run={dir='run', batches=1, prompts_per_batch=2, samples_per_prompt=2}",
    "sampling.max_new_tokens=2",
    "eval=[]",
]


@pytest.fixture
def real(folder, tiny_model):
    """The recipe's model, with weights."""
    shutil.rmtree(folder / "model")
    shutil.copytree(tiny_model, folder / "model")
    return folder


def engine_error(path: Path) -> str:
    import torch
    from plasmid_hf.model.language_model import load_model

    with pytest.raises(ModelError) as caught:
        load_model(path, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False)
    return str(caught.value).replace(str(path), "M")


def test_the_engine_names_a_tensor_of_another_size_and_a_torn_file(real):
    config = json.loads((real / "model" / "config.json").read_text())
    (real / "model" / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    assert engine_error(real / "model") == (
        "model.path: M: tensor model.layers.0.mlp.down_proj.weight has shape [64, 128], config.json requires [64, 96]"
    )
    weights = real / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    said = engine_error(real / "model")
    assert said.startswith("model.path: M cannot be loaded: SafetensorError: ")
    assert "\n" not in said


@pytest.mark.long
def test_weights_that_do_not_fit_their_config_are_named(rl, real):
    config = json.loads((real / "model" / "config.json").read_text())
    (real / "model" / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    said = rl("train", "recipe.toml", *SMALL, printed=STARTING.format("run") + "\n")
    assert len(said) == 1
    assert said[0].startswith("model.path: ")
    assert "model.layers.0.mlp" in said[0]
    assert not (real / "run" / "config.json").exists()


@pytest.mark.long
def test_a_config_that_is_no_model_is_named(rl, real):
    (real / "model" / "config.json").write_text("{}")
    said = rl("train", "recipe.toml", *SMALL, printed=STARTING.format("run") + "\n")
    assert len(said) == 1
    beginnings = ("model.path: model ", "model.path: cannot build a causal language model from model: ")
    assert said[0].startswith(beginnings)  # of the engine or the trainer, whichever reads it first
    assert "model_type" in said[0]


@pytest.mark.long
def test_a_checkpoint_of_another_model_is_named(rl, real, capsys):
    from plasmid_cli.main import app

    with pytest.raises(SystemExit) as stopped:
        app(["train", "recipe.toml", *SMALL, "checkpoint.export=false"])
    assert not stopped.value.code
    make_tiny_model(real / "other", hidden_size=32)
    capsys.readouterr()
    start = "checkpoint.start_from='run/checkpoints/batch-000001'"
    said = rl(
        "train",
        "recipe.toml",
        *SMALL,
        "run.dir='run2'",
        "model.path='other'",
        start,
        printed=STARTING.format("run2") + "\n",
    )
    assert len(said) == 1
    assert "the checkpoint belongs to a different model: " in said[0]
    assert (real / "run" / "checkpoints" / "batch-000001" / "state.json").is_file()
    assert rl(
        "train", "recipe.toml", *SMALL, "run.batches=2", "model.path='other'", "--resume", "checkpoint.export=false"
    ) == [
        "model.path: must not change on resume, was 'model', got 'other'; change it back, or start a new run "
        "with checkpoint.start_from=<the checkpoint>"
    ]
