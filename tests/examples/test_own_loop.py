"""examples/own-loop: its loop trains a tiny model with its own rewards, without the groups that it drops."""

import runpy
import sys
from pathlib import Path

import pytest
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle import session
from plasmid_runtime.observe.journal import read_journal

ROOT = Path(__file__).parents[2]
SMALL = ("run.batches=2", "run.prompts_per_batch=2", "run.samples_per_prompt=4", "eval=[]", "checkpoint.export=false")
PLAIN = ("trainer.dtype=float32", "rollout.dtype=float32", "checkpoint.every=0", "checkpoint.at_end=false")


def test_the_loop_trains(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(session, "make_ray_factory", lambda config: lambda folder: LocalCluster())
    settings = [f"model.path={tiny_model}", f"run.dir={tmp_path / 'run'}", *SMALL, *PLAIN]
    monkeypatch.setattr(sys, "argv", ["train_sums.py", *settings])
    runpy.run_path(str(ROOT / "examples/own-loop/train_sums.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch 1", "batch 2", str(tmp_path / "run")]
    metrics = [entry.metrics for entry in read_journal(tmp_path / "run" / "metrics.jsonl")]
    assert [m["version"] for m in metrics] == [1, 2]


def test_wrong_answers_get_partial_credit():
    from dataclasses import dataclass, field
    from types import SimpleNamespace

    import numpy as np

    @dataclass
    class Group:
        rewards: np.ndarray
        whole: object = field(default=None)

    example = runpy.run_path(str(ROOT / "examples/own-loop/train_sums.py"))
    samples = [SimpleNamespace(text=text) for text in ("5", "6", "9", "none")]
    whole = SimpleNamespace(samples=samples, prompt=SimpleNamespace(target=5))
    group = Group(np.array([1.0, 0.0, 0.0, 0.0]), SimpleNamespace(get=lambda: whole))
    assert example["with_partial_credit"](group).rewards.tolist() == pytest.approx([1.0, 0.1, 0.04, 0.0])
