"""Credit per turn learns faster than credit per sample on held-out prompts, for every seed."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "turn_credit.py"


def load():
    spec = importlib.util.spec_from_file_location("turn_credit", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_credit_by_turn_learns_faster_than_the_sum_per_sample(tmp_path, seed):
    found = load().curves(tmp_path / "runs", seed)
    by_turn, by_sample = found["turn"], found["sample"]
    assert len(by_turn) == len(by_sample) == 9
    assert by_turn[0] == by_sample[0] < 0.35
    assert by_turn[-1] > 0.95
    assert by_sample[-1] < 0.7
