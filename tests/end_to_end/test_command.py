"""The `rl` command on a real cluster: processes, checkpoints, Ctrl-C, and what is left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from plasmid_cli.main import app
from plasmid_runtime.cluster.opening import EarlyRay
from plasmid_runtime.observe.journal import read_journal

from tests.forked_cluster import ForkedCluster
from tests.forked_processes import start_server
from tests.forked_rl import run_rl

RECIPE = """
plugins = ["digit_share.py"]
model.path = "{model}"
trainer = {{ kind = "fsdp", lr = 3e-3 }}
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{{ kind = "digit-share" }}]
sampling.max_new_tokens = 4
data.path = "train.jsonl"
eval = [{{ name = "held-out", data = {{ path = "test.jsonl" }} }}]

[run]
batches = 4
prompts_per_batch = 4
samples_per_prompt = 4
"""


@pytest.fixture
def folder(job):
    job.plain()
    (job.folder / "digits.toml").write_text(RECIPE.format(model=job.model))
    return job.folder


def rl(folder, *arguments):
    command = [sys.executable, "-m", "plasmid_cli", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def train_forked(folder, monkeypatch):
    """Return a function that runs `rl train` in this process, with forked processes instead of Ray's."""
    clusters = []
    start_server()

    def open_cluster(*, log_dir, **options):
        clusters.append(ForkedCluster(log_dir))
        return clusters[-1]

    monkeypatch.chdir(folder)
    monkeypatch.setattr(EarlyRay, "start", lambda ray: None)
    monkeypatch.setattr("plasmid_runtime.lifecycle.startup.open_cluster", open_cluster)

    def train(*settings):
        with pytest.raises(SystemExit) as end:
            app(["train", "digits.toml", *settings])
        assert not end.value.code
        (cluster,) = clusters
        return cluster

    return train


def check_run(run, out, ranks):
    """Check output and files of a run of two batches, and that it can be viewed."""
    assert "batch 2/2" in out
    assert "evaluation held-out: reward" in out
    for path in (
        "final/model.safetensors",
        "reward.png",
        "metrics.jsonl",
        f"logs/trainer-{ranks - 1}.log",
        "checkpoints/batch-000002",
    ):
        assert (run / path).exists(), path
    viewed = run_rl("view", "runs/digits", cwd=run.parent.parent)
    assert viewed.returncode == 0, viewed.stderr
    assert (run / "report.html").exists()


def test_train_and_view_in_separate_processes(folder, train_forked, capfd):
    """The same as over Ray, which the long test below starts."""
    cluster = train_forked("run.batches=2")
    assert cluster.processes.keys() == {"trainer-0", "engine-0", "rollout-worker-0"}
    check_run(folder / "runs" / "digits", capfd.readouterr().out, 1)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_train_and_view_from_the_command_line(folder, ranks):
    process = rl(folder, "train", "digits.toml", "run.batches=2", f"placement.trainer_ranks={ranks}")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    check_run(folder / "runs" / "digits", out, ranks)


@pytest.mark.long
@pytest.mark.parametrize("setting", ["trainer.shard_ranks=1", "trainer.context_parallel=2"])
def test_rank_layouts_give_the_same_training(folder, setting):
    journals = []
    for name, settings in (("other", [setting]), ("default", [])):
        settings = [f"run.dir={name}", "placement.trainer_ranks=2", "run.batches=2", *settings]
        process = rl(folder, "train", "digits.toml", *settings)
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        journals.append([entry.metrics["train/grad_norm"] for entry in read_journal(folder / name / "metrics.jsonl")])
    assert journals[0] == pytest.approx(journals[1], rel=1e-4)


@pytest.mark.long
def test_ctrl_c_saves_prints_how_to_resume_and_leaves_no_process(folder):
    process = rl(folder, "train", "digits.toml", "run.batches=1000")
    journal = folder / "runs/digits/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not journal.exists() or journal.read_text().count("\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume" in out + err
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    done = journal.read_text().count("\n")
    process = rl(folder, "train", "digits.toml", f"run.batches={done + 2}", "--resume")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert journal.read_text().count("\n") == done + 2
