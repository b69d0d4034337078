"""The trainer replays the frozen stream of the head-to-head benchmark, and the benchmark of the driver runs."""

import importlib.util
from pathlib import Path

import pytest
from plasmid_runtime.observe.sample_store import read_samples

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, BENCHMARKS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sample_store_holds_the_stream(tmp_path):
    compare = load("head_to_head/compare.py")
    stream = compare.freeze_stream(compare.arguments(["model", "--batches", "2"]))
    compare.store(stream, tmp_path)
    for index, batch in enumerate(stream):
        groups = read_samples(tmp_path / "samples" / f"batch-{index + 1:06d}.parquet")
        for group, one in zip(groups, batch, strict=True):
            tokens = [sample.token_ids.tolist() for sample in group.samples]
            assert tokens == [one["prompt"] + completion for completion in one["completions"]]
            assert [sample.reward for sample in group.samples] == one["rewards"]
        assert sum(len(s.token_ids) for g in groups for s in g.samples) == compare.count_tokens(batch)


def test_differences_are_relative():
    compare = load("head_to_head/compare.py")
    assert compare.difference("loss", [{"loss": 2.0}], [{"loss": 1.0}]) == 0.5


def test_the_driver_is_measured_with_all_samples_in_flight():
    found = load("driver_scale.py").measure(1, "wait")
    assert found["samples_in_flight"] == 96 and found["events"] >= 4 * 6 and found["cpu_s"] > 0


def test_the_law_of_cost_is_fitted():
    rows = [{"samples_in_flight": n, "cpu_s": 3e-5 * n**1.5} for n in (10, 100, 1000)]
    assert load("driver_scale.py").fit_law(rows) == pytest.approx({"exponent": 1.5, "factor": 3e-5})
