"""`run.profile` and `run.token_values_every` write data of the trainer ranks for the selected batches."""

import gzip
import json

import numpy as np
import pytest
from plasmid.errors import ConfigError
from plasmid.types.token_values import read_token_values
from plasmid_cli.main import cli
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples


def train(job, *overrides):
    recipe = job.write_recipe(batches=2)
    cli(["train", str(recipe), f'run.dir="{job.folder / "run"}"', *overrides], standalone_mode=False)


def test_the_batches_named_and_no_others_are_profiled(job):
    job.run({"run": {"batches": 2, "profile": [2]}, "eval": []})
    folder = job.folder / "run" / "profiles"
    assert sorted(path.name for path in folder.iterdir()) == [
        "batch-000002-trainer-0.json.gz",
        "batch-000002-trainer-0.txt",
    ]
    trace = json.loads(gzip.decompress((folder / "batch-000002-trainer-0.json.gz").read_bytes()))
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert "aten::mm" in names, "operators"
    assert any("Backward" in name for name in names), "the backward pass"
    assert "aten::mm" in (folder / "batch-000002-trainer-0.txt").read_text()


def test_a_batch_that_never_comes_cannot_be_profiled(job, monkeypatch):
    monkeypatch.chdir(job.folder)
    with pytest.raises(ConfigError, match=r"^run: profile names batch 3, and batches = 2; name one of 1 to 2$"):
        train(job, "run.profile=[3]")


def test_every_second_batch_stores_what_training_made_of_its_tokens(job):
    job.run({"run": {"batches": 2, "token_values_every": 2, "steps_per_batch": 2}, "trainer": {"lr": 1e-6}, "eval": []})
    folder = job.folder / "run"
    assert [path.name for path in (folder / "tokens").iterdir()] == ["batch-000002-trainer-0.npz"]
    values = read_token_values(folder, 2)
    samples = {s.id: s for group in read_samples(folder / "samples/batch-000002.parquet") for s in group.samples}
    metrics = read_journal(folder / "metrics.jsonl")[1].metrics
    assert set(values) == set(samples)
    for id_, columns in values.items():
        mask = samples[id_].loss_mask
        assert columns["logprob"][mask] == pytest.approx(samples[id_].rollout_logprobs[mask], abs=0.2)
        assert all((column[~mask] == 0).all() for column in columns.values())
        assert len(set(columns["advantage"][mask].tolist())) == 1, "one advantage for a sample"
    ratios = [columns["ratio"][samples[id_].loss_mask] for id_, columns in values.items()]
    assert np.concatenate(ratios).mean() == pytest.approx(metrics["train/ratio_mean"], rel=1e-2)
    assert any((ratio != 1).any() for ratio in ratios), "the second step"
