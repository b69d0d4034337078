"""The benchmark of a whole step: its phases sum up to the step, and it runs."""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load():
    spec = importlib.util.spec_from_file_location("step", FOLDER / "step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_parts_of_a_step_sum_to_the_step():
    row = {"perf/sample_s": 1.0, "perf/score_s": 0.5, "perf/train_s": 2.0, "perf/sync_s": 1.5, "perf/batch_s": 6.0}
    row |= {"sync/transfer_s": 0.75, "perf/wake_s": 0.25, "perf/offload_s": 0.5}
    found = load().split([row])
    assert found["rest"] == 1.0 and found["step"] == 6.0 and found["pause"] == 0.0
    assert sum(seconds for name, seconds in found.items() if name != "step") == found["step"]


def test_prompts_have_the_wanted_length():
    class Letters:
        def encode(self, text):
            return list(text)

    texts = [load().prompt_of(Letters(), 9, number) for number in (1, 22)]
    assert [len(text) for text in texts] == [9, 10] and len(set(texts)) == 2


@pytest.mark.long
def test_a_tiny_run_is_compared_with_its_phases_measured_separately(tmp_path, capsys):
    out = tmp_path / "step.json"
    options = ["--batches", "2", "--skip", "1", "--syncs", "1", "--new-tokens", "4", "--out", str(out)]
    report = load().main(["--tiny", *options])
    assert report == json.loads(out.read_text())
    assert report["batches"] == 1
    assert all(report["step"][name] > 0 and report["apart"][name] > 0 for name in ("sample", "train", "transfer"))
    assert report["ratio"] == pytest.approx(report["step"]["step"] / report["apart"]["sum"])
    assert "idle seconds per step: engine" in capsys.readouterr().out
