"""`rl plan` on the command line: its output, what it refuses, and what it does not change."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plasmid_cli.main import app
from plasmid_cli.reports.plan_rows import plan_rows
from plasmid_cli.reports.run_data import RunData, load_run
from plasmid_runtime.observe.journal import Journal
from plasmid_runtime.planning.measured import PlanWriter

ROOT = Path(__file__).parents[2]
QWEN = "recipes/qwen3-4b-reasoning-8gpus.toml"


@pytest.fixture
def rl(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")

    def rl(*arguments, code=0):
        with pytest.raises(SystemExit) as stopped:
            app(["plan", *arguments])
        printed, errors = capsys.readouterr()
        assert (stopped.value.code or 0) in (code if isinstance(code, tuple) else (code,)), errors
        return printed or errors

    return rl


def test_a_plan_has_batch_placement_parameters_memory_time_and_money(rl):
    printed = rl(QWEN, "--gpu", "h100", "--price", "2.5", "--response-tokens", "2000", "--prompt-tokens", "100")
    assert re.search(r"rollouts per batch +512  32 prompts x 16 samples", printed)
    assert re.search(r"tokens per batch +1,075,200  512 x \(100 prompt \+ 2,000", printed)
    assert re.search(r"GPUs +8 x h100", printed) and re.search(r"trainer +GPU 0-7  kind megatron, alternating", printed)
    assert re.search(r"model +4\.022 B  qwen3, 36 layers", printed)
    assert re.search(r"of 79\.1( +\d+%){3}", printed) and re.search(r"^total( +\d+\.\d\d){3} *$", printed, re.MULTILINE)
    hours = float(re.search(r"GPU hours +([\d.]+)  8 GPUs", printed)[1])
    assert float(re.search(r"cost +([\d.]+)", printed)[1]) == pytest.approx(2.5 * hours, abs=0.03)
    assert max(map(len, printed.splitlines())) <= 80


def test_a_plan_that_does_not_fit_suggests_the_smallest_change(rl):
    recipe = "recipes/qwen3-30b-a3b-reasoning-8gpus.toml"
    printed = rl(recipe, "--gpu", "h100", code=1)
    assert "does not fit: each GPU that trainer and engine share needs" in printed
    change = re.search(r"smallest change that fits: (.+)", printed)[1].split()
    assert change == ["rollout.gpus_per_engine=8"]
    assert "does not fit" not in rl(recipe, *change, "--gpu", "h100"), "the change is what it says"
    assert "does not fit" not in rl(recipe, "--gpu", "h200")


@pytest.mark.parametrize("kind", ["megatron", "fsdp"])
def test_dedicated_ranks_have_separate_gpus_memory_and_time(rl, kind):
    settings = ["algorithm.kl_coef=0.1", "--gpu", "h100", "--response-tokens", "2000"]
    if kind == "fsdp":
        settings += ["trainer={kind='fsdp'}"]
    shared = rl(QWEN, *settings, code=(0, 1))
    dedicated = rl(QWEN, *settings, "placement.reference_ranks=2", code=(0, 1))
    assert "GPUs" in shared and re.search(r"GPUs +8 x h100", shared)
    assert re.search(r"GPUs +10 x h100", dedicated) and re.search(r"reference +GPU 8-9", dedicated)
    own = dedicated.partition("memory of each GPU of the reference, GiB")[2].partition("time of a batch")[0]
    total = float(re.search(r"^total +([\d.]+)", own, re.MULTILINE)[1])
    assert 4.022 * 2 / (2 if kind == "fsdp" else 1) / 1.0737 < total < 40, "at least the weights in bf16"
    assert "forward passes of policy, reference" not in dedicated
    assert "forward passes of dedicated reference" in dedicated


def test_a_recipe_for_a_cpu_has_memory_and_no_time(rl):
    printed = rl("recipes/smollm2-sums-cpu.toml")
    assert "memory of each process of the trainer, GiB" in printed
    assert re.search(r"time +not estimated +no estimates for CPUs", printed)


def test_mistakes_are_reported_in_one_line(rl, tmp_path):
    assert rl(QWEN, "--gpu", "h1000", code=2).startswith("error: --gpu: unknown GPU 'h1000'; known are h100, ")
    told = rl(QWEN, "model.path=./models/Other", code=2)
    assert told.startswith("error: model.path: models/Other has no config.json, nor has ") and told.count("\n") == 1
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    told = rl("recipes/smollm2-sums-cpu.toml", f"model.path={tmp_path}", code=2)
    assert told.startswith("error: model.path: `rl plan` does not support model_type 'gpt2'; supported are ")


def test_a_plan_imports_neither_torch_nor_ray():
    code = (
        "import sys\n"
        "from plasmid_cli.main import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as stopped:\n    assert not stopped.code\n"
        "print(sorted({'torch', 'ray', 'sglang', 'megatron'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, "plan", QWEN, "--gpu", "h100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two batches on a CPU, with the plan printed by its first run."""
    monkeypatch.chdir(ROOT)
    from plasmid import load_config

    config = load_config("recipes/smollm2-sums-cpu.toml", ["model.path=recipes/models/SmolLM2-135M-Instruct"])
    writer, journal = PlanWriter(config, tmp_path / "plan.json"), Journal(tmp_path / "metrics.jsonl")
    metrics = {"perf/batch_s": 5.0, "perf/train_s": 2.0, "perf/tokens_per_s": 160.0, "rollout/length_mean": 2.5}
    for step, rss in ((1, 4.0), (2, 3.0)):
        journal.append(step, metrics={**metrics, "memory/trainer-0/rss_gb": rss})
        writer.batch_finished(step, metrics)
    return tmp_path


def test_the_plan_of_a_run_stands_beside_what_was_measured(run, capsys):
    (row,) = plan_rows(load_run(run))
    assert row.measured == pytest.approx(3.0e9 / 2**30), "the first batch warms up"
    assert 5 < row.planned < 6 and row.ratio == pytest.approx(row.planned / row.measured)
    with pytest.raises(SystemExit) as stopped:
        app(["view", str(run)])
    assert not stopped.value.code
    assert re.search(r"memory of a trainer process +[\d.]+ GiB +2\.79 GiB +[\d.]+", capsys.readouterr().out)
    assert "GiB planned, 2.79 measured" in (run / "report.html").read_text()


def test_times_are_compared_with_the_median_of_later_batches(tmp_path):
    (tmp_path / "plan.json").write_text('{"device": "h100", "trainer_bytes": 4e9, "train_s": 2.0, "batch_s": "soon"}')
    journal = Journal(tmp_path / "metrics.jsonl")
    for step, seconds in enumerate((20.0, 1.0, 3.0, 2.0), 1):
        metrics = {"perf/train_s": seconds, "perf/batch_s": 9.0, "memory/trainer-1/gpu_peak_train_gb": step * 1.0}
        journal.append(step, metrics=metrics)
    run: RunData = load_run(tmp_path)
    memory, training = plan_rows(run)
    assert (memory.what, memory.ratio) == ("memory of a trainer rank", 1.0)
    assert (training.what, training.measured, training.ratio) == ("training", 2.0, 1.0)


def test_a_price_without_a_gpu_is_refused(rl, monkeypatch):
    from plasmid_runtime.planning import plan

    monkeypatch.setattr(plan, "choose_device", lambda config, gpu: (None, "no known GPU in this machine"))
    assert rl("recipes/smollm2-sums-cpu.toml", "--price", "2.5", code=2) == (
        "error: --price: is per GPU hour, but the plan has no GPU; name one with --gpu, such as --gpu h100\n"
    )
