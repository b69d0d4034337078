"""The benchmark of asynchronous training: rates, completion lengths, and a small run."""

import asyncio
import importlib.util
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(Path(name).stem, FOLDER / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_rate_counts_the_batches_after_the_skipped_ones(tmp_path):
    rows = [{"time": float(10 + 2 * i), "metrics": {"perf/batch_s": 2.0}} for i in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batches = [np.array([[5, 100]])] + [np.array([[5, 10], [5, 20]])] * 3
    found = load("async_step.py").rate(tmp_path, 1, batches)
    assert (found["batches"], found["seconds"]) == (3, 6.0)
    assert (found["tokens_per_s"], found["new_tokens_per_s"]) == (20.0, 15.0)


def test_lengths_are_log_normal_and_the_same_in_every_run():
    class Rollout:
        def __init__(self, number):
            self.id = f"{number}/0"

        async def generate(self, tokens, *, max_new_tokens):
            return max_new_tokens

        def sample(self, prompt, completions):
            return completions[0]

    class Prompt:
        token_ids = ()

    workflow = load("gpu/long_tail.py")

    def draw():
        return [asyncio.run(workflow.run(Rollout(i), Prompt(), median=100.0, sigma=0.8)) for i in range(400)]

    lengths = draw()
    assert lengths == draw()
    logs = [math.log(length) for length in lengths]
    assert statistics.mean(logs) == pytest.approx(math.log(100.0), abs=0.15)
    assert statistics.stdev(logs) == pytest.approx(0.8, abs=0.1)


@pytest.mark.long
def test_a_tiny_run_is_compared_with_its_parts_alone(tmp_path, capsys):
    out = tmp_path / "async.json"
    report = load("async_step.py").main(["--tiny", "--batches", "4", "--skip", "2", "--out", str(out)])
    assert report == json.loads(out.read_text())
    rates = {name: found["tokens_per_s"] for name, found in report["rates"].items()}
    assert report["ratio"] == rates["asynchronous"] / min(rates["engine alone"], rates["trainer alone"])
    assert report["lengths"]["asynchronous"]["samples"] == 4 * 16
    assert f"slower of the others: {report['ratio']:.3f}, with max_staleness 2" in capsys.readouterr().out
