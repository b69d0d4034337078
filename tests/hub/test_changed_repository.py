"""A run that names a Hub model without a revision resumes with the files that it started with."""

import json
import shutil

import pytest
from huggingface_hub import constants
from plasmid import load_config
from plasmid.testing import fakes
from plasmid.types.runs import Mode
from plasmid_models.source import pin_revisions
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run

OLD, NEW = "a" * 40, "b" * 40
RECIPE = f"""
model.path = "tiny/model"
trainer.kind = "fake"
rollout.kind = "fake"
algorithm.kind = "fake"
plugins = ['{fakes.__file__}']
rewards = [{{ kind = "number" }}]
run = {{ dir = "run", batches = 1, prompts_per_batch = 2, samples_per_prompt = 2 }}
sampling.max_new_tokens = 2
data.path = "rows.jsonl"
checkpoint = {{ every = 1, export = false }}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache whose repository has one revision, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub/models--tiny--model"
    make_tiny_model(repository / "snapshots" / OLD)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(OLD)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "target": i + 1}) + "\n" for i in range(9))
    )
    return repository


def change_repository(cache):
    """Add a revision to the repository, as if somebody had pushed it and a later access had downloaded it."""
    shutil.copytree(cache / "snapshots" / OLD, cache / "snapshots" / NEW)
    (cache / "refs/main").write_text(NEW)


def train(*changes, **mode):
    config = load_config("recipe.toml", changes)
    return run(config, mode=Mode(**mode), make_cluster=lambda _: LocalCluster())


def revision(tmp_path):
    return json.loads((tmp_path / "run/config.json").read_text())["model"]["path"].rpartition("/")[2]


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_run_is_resumed_after_its_repository_has_changed(cache, tmp_path, resume):
    assert train().steps == 1 and revision(tmp_path) == OLD
    change_repository(cache)
    assert train("run.batches=2", resume=resume).steps == 2
    assert revision(tmp_path) == OLD, "with the files that it began with"
    assert train("run.dir=other").steps == 1
    begun = json.loads((tmp_path / "other/config.json").read_text())["model"]["path"]
    assert begun.endswith(NEW), "a new run takes the newest"


def test_only_unpinned_names_of_the_same_repository_are_pinned(cache):
    saved = {"model": {"path": f"/cache/models--tiny--model/snapshots/{OLD}", "tokenizer": "auto"}}

    def pinned(*changes):
        return pin_revisions(load_config("recipe.toml", changes), saved).model.path

    assert pinned() == f"tiny/model@{OLD}"
    assert pinned("model.path=tiny/model@v2") == "tiny/model@v2"
    assert pinned("model.path=tiny/other") == "tiny/other"
    assert pinned(f"model.path={cache}") == str(cache)
    for odd in ({}, {"model": None}, {"model": {"path": 3}}, {"model": {"path": "models/tiny"}}):
        assert pin_revisions(load_config("recipe.toml"), odd).model.path == "tiny/model"
