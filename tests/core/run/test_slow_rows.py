"""Rows that take long to create delay neither the loop nor Ctrl-C, and change no draw."""

import json

import pytest
from plasmid_runtime.observe.sample_store import read_samples

ROWS = """
import os, pathlib, signal, time

def batches():
    metrics = pathlib.Path("run/metrics.jsonl")
    return metrics.read_text().count("\\n") if metrics.exists() else 0

def wait_for_batches(count):
    enough, latest = batches() + count, time.monotonic() + 60
    while batches() < enough and time.monotonic() < latest:
        time.sleep(0.01)

def row(*, seed, index):
    if index == 8 and not os.path.exists("begun"):
        open("begun", "w").write(str(time.time()))
        IN_ROW_8
        open("done", "w").write(str(time.time()))
    return {"prompt": f"say {index}", "target": index}
"""


def run(runner, in_row_8, *, staleness, **mode):
    """Run 12 batches of one row. A statement is executed when row 8 is first created."""
    if in_row_8:
        (runner.folder / "rows.py").write_text(ROWS.replace("IN_ROW_8", in_row_8))
    changes = {
        "data": {"kind": "function", "function": f"{runner.folder}/rows.py:row"},
        "run": {"batches": 12, "prompts_per_batch": 1, "max_staleness": staleness},
    }
    return runner.run(changes, **mode)


def trained(result):
    """Return the draw number and the prompt of each batch, in order."""
    files = sorted((result.run_dir / "samples").glob("batch-*.parquet"))
    return [(group.id, group.prompt.id) for file in files for group in read_samples(file)]


def test_batches_end_while_a_row_is_made(runner, monkeypatch):
    monkeypatch.chdir(runner.folder)
    result = run(runner, "wait_for_batches(2)", staleness=3)
    begun, done = (float((runner.folder / name).read_text()) for name in ("begun", "done"))
    ends = [json.loads(line)["time"] for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(ends) == 12 and sum(begun < end < done for end in ends) >= 2


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_slow_row_is_drawn_in_its_place(runner, monkeypatch, staleness):
    monkeypatch.chdir(runner.folder)
    groups = trained(run(runner, "time.sleep(0.5)", staleness=staleness))
    assert groups == [(draw, f"row:{draw}") for draw, _ in groups]
    if staleness == 0:  # otherwise a batch takes the group that finishes first
        assert [draw for draw, _ in groups] == list(range(12))


def test_ctrl_c_saves_a_run_that_waits_for_a_row(runner, monkeypatch):
    monkeypatch.chdir(runner.folder)
    stopped = run(runner, "os.kill(os.getpid(), signal.SIGINT); time.sleep(3600)", staleness=0)
    assert stopped.interrupted and stopped.steps == 8
    result = run(runner, "", staleness=0, resume=True)
    assert trained(result) == [(index, f"row:{index}") for index in range(12)]
