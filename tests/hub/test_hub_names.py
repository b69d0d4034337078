"""Models and data by their names on the Hugging Face Hub, with a server that implements its API."""

import json
import os
import re

import pyarrow
import pytest
from plasmid_models.testing import make_tiny_model
from pyarrow import parquet

from tests.forked_rl import run_rl
from tests.hub.hub_server import SHA, hub_server

ROWS = [{"question": f"{i}+1=", "answer": f"so #### {i + 1}"} for i in range(6)]
RECIPE = """
model.path = "tiny/model"
trainer.kind = "fsdp"
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{ kind = "number" }]
run = { batches = 1, prompts_per_batch = 2, samples_per_prompt = 2 }
sampling.max_new_tokens = 2

[data]
path = "hf://datasets/tiny/sums/train.jsonl@[0:4]"
columns = { prompt = "question", target = "{{ answer.split('####')[-1].strip() }}" }
"""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    make_tiny_model(root / "models/tiny/model")
    (root / "models/tiny/model/pytorch_model.bin").write_bytes(b"another format")
    (root / "models/tiny/model/onnx").mkdir()
    (root / "models/tiny/model/onnx/model.safetensors").write_bytes(b"another format")
    sums = root / "datasets/tiny/sums"
    (sums / "main").mkdir(parents=True)
    (sums / "other").mkdir()
    (sums / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("main/train-00000-of-00001", "main/test-00000-of-00001", "other/train-00000-of-00001"):
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), sums / f"{name}.parquet")
    return root


@pytest.fixture
def hub(repositories, tmp_path, monkeypatch):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    with hub_server(repositories) as found:
        yield found


@pytest.fixture
def rl(hub, tmp_path):
    def run(*arguments, offline=False, endpoint=hub.url, code=0):
        environment = dict(os.environ, HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "cache"), HF_HUB_DISABLE_XET="1")
        environment["HF_HUB_OFFLINE"] = "1" if offline else "0"
        done = run_rl(*arguments, program="rl with hub", timeout=240, env=environment)
        assert done.returncode == code, done.stderr + done.stdout
        assert code == 0 or "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr.splitlines()[-1]

    return run


def test_a_dry_run_downloads_no_weights(rl, hub):
    printed = rl("train", "recipe.toml", "--dry-run")
    assert "weights to download" in printed and "hf download tiny/model" in printed
    assert not [file for file in hub.files if file.endswith((".safetensors", ".bin"))]
    assert 'path = "tiny/model"' in printed, "the recipe keeps the name"
    assert re.search(r"prompts +4 ", printed)


@pytest.mark.long
def test_a_run_downloads_needed_files_and_resumes_offline(rl, hub, tmp_path):
    rl("train", "recipe.toml", "run.dir=run")
    model = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert set(hub.files) == {*(f"tiny/model/{name}" for name in model), "tiny/sums/train.jsonl"}
    recorded = json.loads((tmp_path / "run/config.json").read_text())
    assert recorded["model"]["path"].endswith(f"models--tiny--model/snapshots/{SHA}"), "the revision is on record"
    asked = len(hub.files)
    printed = rl("train", "recipe.toml", "--dry-run", offline=True)
    assert "weights to download" not in printed and len(hub.files) == asked
    rl("sample", "recipe.toml", "-n", "1", "--dry", offline=True)
    rl("train", "recipe.toml", "--dry-run", endpoint="http://127.0.0.1:9")  # nothing listens there


def refused(*arguments):
    """Return the last line of a command that contacts no hub."""
    done = run_rl(*arguments)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


def test_without_the_hub_the_error_names_the_command_that_downloads(hub):
    told = refused("train", "recipe.toml", "--dry-run")
    assert told == (
        "error: model.path: no such folder: tiny/model, and the Hugging Face cache has no such model; download it: "
        "hf download tiny/model"
    )
    told = refused("train", "recipe.toml", "model.path=tiny/model@v1", "--dry-run")
    assert told.endswith("download it: hf download tiny/model --revision v1")


def test_a_name_that_the_hub_does_not_have_is_reported(rl, hub):
    told = rl("train", "recipe.toml", "model.path=tiny/modle", "--dry-run", code=2)
    assert told == (
        f"error: model.path: no such folder: tiny/modle, and {hub.url} has no such model; correct the name, or log in "
        "if it is private or gated: hf auth login"
    )


@pytest.mark.long
def test_missing_data_are_reported(rl, hub):
    for path, told in (
        (
            "hf://datasets/tiny/sums/tset.jsonl",
            f"error: data.path: {hub.url} has no hf://datasets/tiny/sums/tset.jsonl; ",
        ),
        (
            "hf://datasets/tiny/smus/train.jsonl",
            f"error: data.path: {hub.url} has no hf://datasets/tiny/smus/train.jso",
        ),
        (
            "hf://datasets/tiny/sums",
            "error: data.path: hf://datasets/tiny/sums has no file name; add one, for example hf:",
        ),
        ("hf://models/tiny", "error: data.path: hf://models/tiny must look like hf://datasets/org/name/file.parquet"),
    ):
        assert rl("train", "recipe.toml", f"data.path={path}", "--dry-run", code=2).startswith(told)


def test_folders_of_data_sets_are_read_by_split(rl, hub):
    folder = ("data.kind=datasets", "data.path=hf://datasets/tiny/sums/main", "data.split=test")
    columns = 'data.columns={ prompt = "question", target = "answer" }'
    printed = rl("train", "recipe.toml", *folder, columns, "--dry-run")
    assert re.search(r"prompts +6 ", printed)
    assert [file for file in hub.files if "sums" in file] == ["tiny/sums/main/test-00000-of-00001.parquet"]


def test_a_folder_with_the_name_of_an_organisation_is_one_here(hub, tmp_path):
    (tmp_path / "tiny").mkdir()
    told = refused("train", "recipe.toml", "--dry-run")
    assert told.startswith("error: model.path: no such folder: tiny/model (searched from")


def test_a_path_that_begins_with_a_dot_is_a_folder_here(hub):
    told = refused("train", "recipe.toml", "model.path=./tiny/model", "--dry-run")
    assert told.startswith("error: model.path: no such folder: ./tiny/model (searched from")
