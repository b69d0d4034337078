"""Recipes of workflows and data that no page or example runs: one batch each, with a tiny model."""

import json
import shutil
from pathlib import Path

import pytest
from plasmid import load_config
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples

ROOT = Path(__file__).parents[2]
SMALL = (
    "run.batches=1",
    "run.prompts_per_batch=2",
    "run.samples_per_prompt=4",
    "eval=[]",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "checkpoint.export=false",
    # one precision, because the threads of a local cluster share torch's default dtype
    "trainer.dtype=float32",
    "rollout.dtype=float32",
)


@pytest.fixture(scope="module")
def long_model(tiny_model, tmp_path_factory):
    """The tiny model for texts of 2048 tokens: its tokens are characters, and tool descriptions are long."""
    model = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return model


@pytest.fixture
def batch(long_model, tmp_path, monkeypatch):
    """Return a function that runs a batch of a recipe and returns its samples and metrics."""

    def make(name, *changes):
        monkeypatch.chdir(ROOT)
        settings = (f"model.path={long_model}", f"run.dir={tmp_path / 'run'}", *SMALL, *changes)
        assert run(load_config(f"recipes/{name}.toml", settings), make_cluster=lambda _: LocalCluster()).steps == 1
        (entry,) = read_journal(tmp_path / "run" / "metrics.jsonl")
        files = (tmp_path / "run" / "samples").glob("batch-*.parquet")
        samples = [sample for file in files for group in read_samples(file) for sample in group.samples]
        assert len(samples) == 8 and not any(sample.error for sample in samples)
        return samples, dict(entry.metrics)

    return make


def test_the_recipe_with_an_environment(batch):
    samples, metrics = batch("smollm2-guess-environment-cpu")
    assert all(1 <= len(sample.metadata["environment"]["rewards"]) <= 4 for sample in samples)
    assert "reward/environment" in metrics


def test_the_recipe_with_tools(batch):
    samples, metrics = batch("smollm2-products-tools-cpu")
    assert all({"turns", "calls", "failed_calls"} <= set(sample.metadata) for sample in samples)
    assert "reward/number" in metrics


def test_the_recipe_with_a_mixture_a_curriculum_and_profiles(batch):
    samples, metrics = batch("smollm2-mixture-cpu", "run.prompts_per_batch=2")
    assert {"reward/right", "reward/mean"} <= set(metrics)
    assert {sample.sampling.max_new_tokens for sample in samples} <= {2, 3}
