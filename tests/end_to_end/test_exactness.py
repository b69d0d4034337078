"""Exact resume and exact replay of real runs, bit by bit."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from plasmid.observe.sample_store import read_samples

UNTIMED = ("train/", "reward/", "rollout/", "version")
SETTINGS = {
    "checkpoint": {"every": 2, "keep_last": 10, "export": False},
    "filters": [{"kind": "nonzero-spread"}],
    "algorithm": {"monitor_kl": True},
    "run": {"steps_per_batch": 2},
}


def curve(metrics):
    return [{k: v for k, v in m.items() if k.startswith(UNTIMED)} for m in metrics]


def samples(folder):
    files = sorted((folder / "samples").glob("batch-*.parquet"))
    return [
        (file.name, s.id, s.token_ids.tolist(), s.rollout_logprobs.tolist())
        for file in files
        for group in read_samples(file)
        for s in group.samples
    ]


def test_a_resumed_run_is_bit_identical_to_one_that_was_never_stopped(job):
    job.run(SETTINGS | {"run": {"steps_per_batch": 2, "dir": str(job.folder / "whole")}})
    job.run(SETTINGS)
    for late in ("batch-000004", "batch-000006"):
        shutil.rmtree(job.folder / "run" / "checkpoints" / late)
    job.run(SETTINGS, resume=True)
    assert curve(job.metrics()) == curve(job.metrics("whole"))
    assert samples(job.folder / "run") == samples(job.folder / "whole")


def test_a_replay_is_bit_identical_when_repeated_and_to_the_run_itself(job):
    job.run({"run": {"batches": 3}})
    for name in ("first", "second"):
        job.run({"run": {"dir": str(job.folder / name)}}, replay=job.folder / "run")
    assert curve(job.metrics("first")) == curve(job.metrics("second"))
    losses = [[m["train/loss"] for m in job.metrics(name)] for name in ("first", "run")]
    assert losses[0] == losses[1]


def remove(folder):
    """Remove a folder that dying processes may still write logs into."""
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.parametrize("after", ["batch-000002", "samples/batch-000003.parquet", ".tmp"])
def test_a_run_that_was_killed_continues_bit_identically(job, after):
    recipe = job.folder / "digits.json"
    job.run(SETTINGS | {"run": {"steps_per_batch": 2, "dir": str(job.folder / "whole")}})
    recipe.write_text(job.config(SETTINGS).model_dump_json())
    program = (
        "import json, sys, pathlib; from plasmid.recipe import resolve; import plasmid; "
        "plasmid.train(resolve(json.loads(pathlib.Path(sys.argv[1]).read_text())), resume=sys.argv[2] == 'resume')"
    )

    def start(mode):
        command = [sys.executable, "-c", program, str(recipe), mode]
        return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)

    process = start("begin")
    deadline = time.monotonic() + 120
    folder = job.folder / "run"
    while not any(after in str(path) for path in folder.rglob("*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if not any((folder / "checkpoints").glob("batch-*")):
        remove(folder)  # killed before the first save: nothing to resume, the run begins anew
        assert start("begin").wait(timeout=240) == 0
    else:
        assert start("resume").wait(timeout=240) == 0
    assert curve(job.metrics()) == curve(job.metrics("whole"))
