"""Evaluating a run, its checkpoints and its final policy gives the metrics that the run itself measured."""

import json

import pytest
import tomli_w
from plasmid_cli.main import app
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.observe.journal import read_journal


@pytest.fixture
def rl(job, capsys, monkeypatch):
    """Return a function that runs `rl eval` in the folder of a job with a plugin file for rewards, and returns its
    metrics."""
    monkeypatch.chdir(job.folder)

    def rl(*arguments):
        with pytest.raises(SystemExit) as end:
            app(["eval", *arguments, "--json", "--trust-recipe"], make_cluster=lambda _: LocalCluster())
        out, err = capsys.readouterr()
        assert not end.value.code, err
        return json.loads(out)["held-out"]

    return rl


def test_rl_eval_reproduces_the_evaluation_of_the_run(job, rl):
    job.run({"run": {"batches": 2}, "checkpoint": {"every": 1}, "eval": [{**job.plain()["eval"][0], "every": 1}]})
    measured = {entry.step: dict(entry.metrics) for entry in read_journal(job.folder / "run" / "evaluations.jsonl")}
    assert measured[1]["eval/held-out/reward"] != measured[2]["eval/held-out/reward"]
    of_checkpoint = rl("--model", "run/checkpoints/batch-000001")
    assert of_checkpoint["eval/held-out/reward"] == measured[1]["eval/held-out/reward"]
    assert of_checkpoint["eval/held-out/version_min"] == 1
    assert rl("--model", "run")["eval/held-out/reward"] == measured[2]["eval/held-out/reward"]
    plain = {**job.plain(), "eval": [{**job.plain()["eval"][0], "limit": 3}]}
    (job.folder / "few.toml").write_text(tomli_w.dumps(plain))
    few = rl("few.toml", "--model", "run", "run.dir='few'")
    assert few["eval/held-out/reward"] != measured[2]["eval/held-out/reward"]
    names = {path.name for path in job.folder.iterdir()}
    assert {"run-eval", "run-eval-2", "few"} <= names


@pytest.mark.parametrize("mode", ["floating", "engine"])
def test_a_real_engine_evaluates_beside_training(job, mode):
    set_ = {**job.plain()["eval"][0], "mode": mode, "every": 2}
    set_["sampling"] = {"max_new_tokens": 4, "temperature": 0.0}
    changes = {
        "run": {"batches": 4, "max_staleness": 1},
        "placement": {"eval_ranks": int(mode == "engine")},
        "eval": [set_, {**set_, "name": "blocking", "mode": "block"}],
    }
    job.run(changes)
    found = {(e.name, e.step): e.metrics for e in read_journal(job.folder / "run" / "evaluations.jsonl")}
    assert {step for name, step in found if name == "held-out"} == {0, 2, 4}
    assert {step for name, step in found if name == "mean"} == {0, 2, 4}
    for step in (0, 2, 4) if mode == "engine" else ():
        own, shared = found["held-out", step], found["blocking", step]
        assert own["eval/held-out/version_min"] == own["eval/held-out/version_max"] == step
        assert own["eval/held-out/reward"] == shared["eval/blocking/reward"]
