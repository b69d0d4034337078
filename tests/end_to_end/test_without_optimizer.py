"""Checkpoints without optimizer state, through the `rl` command: what they can be used for, and what not."""

import re
import signal
import subprocess
import sys

import pytest
from plasmid.errors import CheckpointError
from plasmid_convert import DCP, HF, compare
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.evaluate import evaluate
from plasmid_runtime.lifecycle.export import export_checkpoint

from tests.forked_rl import run_rl

OPTIONS = ("checkpoint.every=2", "checkpoint.optimizer=false", "checkpoint.at_end=true", "checkpoint.export=true")


@pytest.fixture
def rl(job):
    """Return a function that runs the command in the job's folder and returns its output, or its error if ``code`` is
    given."""
    job.write_recipe(batches=2)

    def run(*arguments, code=0):
        done = run_rl(*arguments, cwd=job.folder, timeout=500)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    return run


def size(checkpoint):
    return sum(file.stat().st_size for file in (checkpoint / "trainer").iterdir())


def assert_same(left, reader, right):
    found = compare(left, right, left_reader=reader, right_reader=HF())
    assert found.num_equal and not found.differences


def test_a_checkpoint_without_the_optimizer_is_exported_evaluated_and_started_from_and_not_resumed(job):
    lean = {"run": {"dir": str(job.folder / "lean"), "batches": 2}, "checkpoint": {"optimizer": False}}
    result = job.run(lean)
    assert_same(result.checkpoint, DCP(), result.final)
    export_checkpoint(result.run_dir, job.folder / "exported", trust_recipe=True, make_cluster=lambda _: LocalCluster())
    assert_same(job.folder / "exported", HF(), result.final)
    config = job.config({"run": {"dir": str(job.folder / "scores")}})
    scores = evaluate(config, checkpoint=result.checkpoint, make_cluster=lambda _: LocalCluster())
    assert scores["held-out"]["eval/held-out/reward"] == result.evaluations["held-out"][-1][1]
    more = {"run": {"dir": str(result.run_dir), "batches": 4}}
    with pytest.raises(CheckpointError) as error:
        job.run(more, resume=True)
    assert str(error.value) == (
        f"{result.checkpoint}: cannot be resumed, since it was saved with checkpoint.optimizer = false, without the "
        f"optimizer's state; start a new run from its weights with checkpoint.start_from={result.checkpoint}"
    )
    assert job.run(lean, resume=True).was_finished
    full = {
        "run": {"dir": str(job.folder / "full"), "batches": 1},
        "checkpoint": {"start_from": str(result.checkpoint)},
    }
    again = job.run(full)
    assert again.evaluations["held-out"][0][1] == result.evaluations["held-out"][-1][1]
    assert [metrics["train/step"] for metrics in job.metrics("full")] == [1]
    assert size(again.checkpoint) > 2.5 * size(result.checkpoint)


@pytest.mark.long
def test_the_command_saves_and_exports_without_the_optimizer_and_refuses_to_resume(rl, job):
    rl("train", "digits.toml", *OPTIONS, "run.dir=lean")
    name = "lean/checkpoints/batch-000002"
    rl("export", "lean", "exported", "--trust-recipe")
    assert_same(job.folder / "exported", HF(), job.folder / "lean/final")
    assert rl("train", "digits.toml", "run.dir=lean", "run.batches=4", "--resume", code=2).startswith(
        f"error: {name}: cannot be resumed, since it was saved with checkpoint.optimizer = false"
    )
    rl("train", "digits.toml", "run.dir=full", "checkpoint.at_end=true", f"checkpoint.start_from={name}")
    assert size(job.folder / "full/checkpoints/batch-000002") > 2.5 * size(job.folder / name)


@pytest.mark.long
def test_an_interrupted_run_without_the_optimizer_names_the_command_that_starts_from_it(rl, job):
    command = [
        sys.executable,
        "-m",
        "plasmid_cli",
        "train",
        "digits.toml",
        *OPTIONS,
        "run.dir=lean",
        "run.batches=1000",
    ]
    process = subprocess.Popen(command, cwd=job.folder, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("batch 3/1000"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(60) == 130
    batch = re.search(r"interrupted after batch (\d+); start from there with: (.*)", rest)
    assert batch[2].endswith(
        f"run.dir=lean run.batches=1000 run.dir=lean-2 checkpoint.start_from=lean/checkpoints/batch-{int(batch[1]):06}"
    )


def test_trainers_that_always_save_it_and_supervised_runs_refuse_the_setting(rl):
    assert rl("train", "digits.toml", "trainer.kind=megatron", "checkpoint.optimizer=false", "--dry-run", code=2) == (
        "error: checkpoint.optimizer: must be true with trainer 'megatron', whose checkpoints always contain the "
        "optimizer's state; remove the setting\n"
    )
    assert rl("train", "digits.toml", "checkpoint.optimizer=false", "--supervise", code=2) == (
        "error: checkpoint.optimizer: must be true with --supervise, because a run can be resumed only with the "
        "optimizer's state; remove the setting\n"
    )
