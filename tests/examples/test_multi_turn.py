"""The fan-out example, run unchanged with a tiny model."""

import json
from pathlib import Path

import pytest
from plasmid import load_config
from plasmid.types.runs import Mode
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples

ROOT = Path(__file__).parents[2]


@pytest.fixture
def done(tmp_path, tiny_model, monkeypatch):
    """The folder of a shortened run of the recipe."""
    monkeypatch.chdir(ROOT)
    changes = [
        f"model.path='{tiny_model}'",
        f"run.dir='{tmp_path / 'run'}'",
        "run.batches=1",
        "run.prompts_per_batch=2",
        "run.samples_per_prompt=4",
        "trainer.dtype='float32'",
        "rollout.dtype='float32'",
        "checkpoint.at_end=false",
        "checkpoint.export=false",
    ]
    config = load_config("recipes/smollm2-verify-function-cpu.toml", changes)
    run(config, mode=Mode(), make_cluster=lambda _: LocalCluster())
    return tmp_path / "run"


def test_every_rollout_makes_a_solution_and_a_verdict_that_count_once(done):
    groups = [group for file in (done / "samples").glob("batch-*.parquet") for group in read_samples(file)]
    for group in groups:
        parts = [(sample.rollout_id, sample.metadata["part"]) for sample in group.samples]
        assert sorted(parts) == sorted((f"{group.id}/{i}", part) for i in range(4) for part in ("solve", "verify"))
        for sample in group.samples:
            assert sample.score.components.keys() == {
                "solved-or-judged",
                f"solved-or-judged.{'solved' if sample.metadata['part'] == 'solve' else 'judged'}",
            }
    (entry,) = read_journal(done / "metrics.jsonl")
    assert entry.metrics["train/logprob_diff_max"] < 2e-5, "also where the verdict has a prompt of its own"
    assert json.loads((done / "config.json").read_text())["workflow"]["kind"] == "function"
