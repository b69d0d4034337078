"""The real command in a process of its own: how quickly it fails, and what is left behind."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import plasmid.testing.fakes
import psutil
import pytest
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples

PLUGIN = str(Path(__file__).with_name("failing_plugin.py"))
FAKES = plasmid.testing.fakes.__file__
QUICK = [
    (["trainer.lrr=1"], "trainer.lrr: no such setting; did you mean 'lr'?"),
    (
        ["run.steps_per_batch=3", "--dry-run"],
        "run.steps_per_batch: 16 rollouts (prompts_per_batch x samples_per_prompt) ",
    ),
    (["data.path='bad.jsonl'"], "bad.jsonl:2: not valid JSON: expecting value at column 1"),
    (["model.path='modle'"], "model.path: no such folder: modle; did you mean model?"),
    (["--resume"], "run.dir: run holds no run to resume; start without --resume"),
    (
        ["--replay", "no"],
        "--replay: no holds no samples (samples/batch-*.parquet); name the folder of a run that has some",
    ),
    (["--plugin", "no.py"], "plugins: no such file: no.py"),
]


def cpu_seconds() -> float:
    """Of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rl(*argv: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plasmid_cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.parametrize(("changes", "message"), QUICK)
def test_a_mistake_is_found_within_two_seconds(folder, changes, message):
    (folder / "bad.jsonl").write_text('{"prompt": "a", "target": 1}\nbad\n')
    seconds = []
    for _ in range(5):  # the best of some, and of the processor only: other work on the machine is not ours
        before = cpu_seconds()
        done = rl("train", "recipe.toml", *changes)
        seconds.append(cpu_seconds() - before)
        if seconds[-1] < 2:
            break
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {message}")
    assert min(seconds) < 2, seconds


@pytest.mark.long
def test_a_run_that_fails_leaves_its_results_and_no_process(folder):
    changes = [
        "trainer={kind='growing'}",
        "rollout={kind='fake'}",
        "algorithm={kind='fake'}",
        "rewards=[{kind='bad', how='block', from_group=8, timeout_s=0.5}]",
        "eval=[]",
        "run.samples_per_prompt=2",
        "checkpoint={every=1, export=false}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "plasmid_cli", "train", "recipe.toml", *changes, "--plugin", PLUGIN, "--plugin", FAKES],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen: dict[int, psutil.Process] = {}
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            seen |= {p.pid: p for p in watched.children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert err.count("\n") == 1
    assert err.startswith("error: rewards.0 (bad): no score for sample ")
    assert err.endswith(" within timeout_s = 0.5; make it faster, let it give up by itself, or raise timeout_s\n")
    assert [entry.step for entry in read_journal(folder / "run" / "metrics.jsonl")] == [1, 2]
    assert len(read_samples(folder / "run" / "samples" / "batch-000002.parquet")) == 4
    assert json.loads((folder / "run" / "checkpoints" / "batch-000002" / "state.json").read_text())["batch"] == 2
    assert len(seen) >= 3, "Ray and a rollout worker were not seen"
    _, alive = psutil.wait_procs(seen.values(), timeout=20)
    assert [p.cmdline() for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
