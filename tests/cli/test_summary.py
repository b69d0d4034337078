import io
import json

from plasmid_cli.reports.run_data import load_run
from plasmid_cli.reports.summary import cost_rows, key_figures, print_run, print_summary
from plasmid_runtime.observe.journal import Journal
from rich.console import Console


def printed(action):
    console = Console(file=io.StringIO(), width=80)
    action(console)
    return console.file.getvalue()


def cells(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_summary_has_the_figures_of_the_run_the_curve_and_the_paths(run_dir, make_result):
    text = printed(lambda console: print_summary(make_result(run_dir), console))
    assert "finished sums-grpo-cpu after 60 batches in 6:52" in text
    assert "\u25cf" in text and "\u2524" in text, "a curve with marked evaluations"
    for name in ("final", "reward.png", "metrics.jsonl", "evaluations.jsonl", "samples"):
        assert str(run_dir / name) in text
    assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_every_line_but_paths_fits_80_columns(run_dir, make_result):
    text = printed(lambda console: print_summary(make_result(run_dir), console))
    assert max(len(line) for line in text.splitlines() if not line.startswith(str(run_dir))) <= 80


def test_the_summary_of_an_interrupted_run_says_stopped(run_dir, make_result):
    text = printed(lambda console: print_summary(make_result(run_dir, interrupted=True), console))
    assert "stopped sums-grpo-cpu" in text


def test_figures_are_those_of_the_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "r"}))
    metrics, evaluations = Journal(tmp_path / "metrics.jsonl"), Journal(tmp_path / "evaluations.jsonl")
    for step in range(1, 5):
        speed = {"perf/tokens_per_s": 100.0 * step, "perf/batch_s": float(step)}
        metrics.append(step, metrics={"reward/mean": step / 10, "memory/rss_peak_gib": 2 + step % 3, **speed})
    for step, reward in ((0, 0.25), (2, 0.4), (4, 0.75), (4, 0.8)):
        evaluations.append(step, metrics={"eval/a/reward": reward, "eval/a/pass@4": 1.0}, name="a")
    run = load_run(tmp_path)
    assert dict(cost_rows(run)) == {
        "batches trained": "4",
        "time in batches": "0:10",
        "tokens per second": "300",
        "peak memory, all processes": "4.00 GiB",
    }
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "r", "placement": {"nodes": 2}}))
    assert ("peak memory, driver only", "4.00 GiB") in cost_rows(load_run(tmp_path))
    rows = cells(key_figures(run))
    assert "evaluation a: reward 0.2500 0.8000 +0.5500" in rows, "a repeated evaluation counts once, the last one"
    assert "evaluation a: pass@4 1.0000 1.0000 +0.0000" in rows
    assert "train reward 0.1000 0.4000 +0.3000" in rows


def test_a_run_without_batches_or_rewards_has_a_summary(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "0 batches" in printed(lambda console: print_run(load_run(tmp_path), console))
    Journal(tmp_path / "metrics.jsonl").append(1, metrics={"train/loss": 1.0})
    assert "batches trained" in printed(lambda console: print_run(load_run(tmp_path), console))
    assert not (tmp_path / "reward.png").exists()
