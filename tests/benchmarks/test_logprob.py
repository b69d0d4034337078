"""The benchmark of the log-probability head runs on a CPU, and all its variants compute the same."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SMALL = ["--device", "cpu", "--dtype", "float32", "--tokens", "40", "--hidden", "16", "--vocab", "99"]
FILE = Path(__file__).parents[2] / "benchmarks/logprob.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_logprob", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_variant_has_a_row_with_its_ratio_to_the_measured_limit(benchmark, tmp_path, capsys):
    out = tmp_path / "results/logprob.json"
    benchmark.main([*SMALL, "--chunks", "16", "--seconds", "0.001", "--out", str(out)])
    report = json.loads(out.read_text())
    assert len(report["rows"]) == 12 and not [row for row in report["rows"] if "error" in row]
    printed = capsys.readouterr().out
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["ms"] / report["limits"][row["limit"]])
        assert f"| {row['name']} | {row['ms']:.2f} |" in printed
    assert report["limits"]["four products"] > report["limits"]["three products"] > 0
    assert all(error < 1e-5 for pair in report["errors"].values() for error in pair)


def test_all_ways_to_one_loss_have_one_gradient(benchmark):
    case = benchmark.Case(benchmark.arguments(SMALL))
    expected = benchmark.gradients_of(case, lambda: benchmark.unfused(case))
    ways = [
        lambda: benchmark.apart(case, case.loss, chunk_size=16),
        lambda: benchmark.fused(case, case.loss, chunk_size=16),
    ]
    for way in ways:
        for a, b in zip(benchmark.gradients_of(case, way), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_the_plain_formulas_for_the_compiler_are_those_of_the_kernels(benchmark):
    case = benchmark.Case(benchmark.arguments(SMALL))
    with torch.compiler.set_stance("force_eager"):
        made = benchmark.compiled_kernels()
        ours = benchmark.gradients_of(case, lambda: benchmark.apart(case, case.loss, kernels=made))
    for a, b in zip(ours, benchmark.gradients_of(case, lambda: benchmark.apart(case, case.loss)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_kept_sets_hold_the_drawn_token_and_make_every_way_one_gradient(benchmark):
    case = benchmark.Case(benchmark.arguments([*SMALL, "--kept", "7"]))
    sets = case.kept.token_ids.reshape(-1, 7).long()
    assert all(len(set(row)) == 7 for row in sets.tolist())
    assert torch.equal(sets[:, 0], case.targets) and int(sets.max()) < 99
    z = (case.hidden @ case.weight.T) / case.temperatures[:, None]
    kept = z.gather(1, sets).log_softmax(-1)[:, 0]
    scores = benchmark.token_logprobs(*case.inputs, kept=case.kept)
    torch.testing.assert_close(scores.logprobs, kept, rtol=0, atol=1e-5)
    expected = benchmark.gradients_of(case, lambda: case.loss(scores._replace(logprobs=kept)).backward())
    for way in (benchmark.apart, benchmark.fused):
        got = benchmark.gradients_of(case, lambda w=way: w(case, case.loss, kept=case.kept, chunk_size=16))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
