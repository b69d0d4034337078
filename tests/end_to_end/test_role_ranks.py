"""Reference and critic with separate processes on a real cluster."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from plasmid.errors import EXIT_RETRY
from plasmid.types.runs import Mode
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal

from tests.end_to_end.role_processes import RolesInProcesses


def test_roles_in_separate_processes_train_the_same_and_resume_exactly(job, two_processes):
    """The same as over Ray, which the long tests below start."""
    settings = {
        "algorithm": {"kind": "ppo", "critic_warmup": 1, "reward_kl_coef": 0.1, "monitor_kl": True},
        "reference": {"update_every": 2},
        "trainer": {"lr": 0.03, "critic": {"lr": 0.02, "export": True}},
        "checkpoint": {"export": True},
        "eval": [],
    }

    def train(name, batches, *, resume=False, **placement):
        changes = {"run": {"dir": str(job.folder / name), "batches": batches}, "placement": placement}
        config, cluster = job.config(settings | changes), RolesInProcesses(two_processes)
        run(config, mode=Mode(resume=resume), make_cluster=lambda _: cluster)
        return [actor.name for actor in cluster.processes.actors]

    assert train("shared", 4) == []
    for batches, resume in ((3, False), (4, True)):
        names = train("apart", batches, resume=resume, reference_ranks=1, critic_ranks=1)
        assert sorted(names) == ["critic-0", "reference-0"]
    assert curve(job.folder / "apart") == curve(job.folder / "shared")
    _, second, third, fourth = curve(job.folder / "apart")
    assert second["train/grad_norm"] and third["train/kl"] == 0 and fourth["train/kl"], "the reference has moved once"
    both = [job.folder / name / "final-critic/model.safetensors" for name in ("apart", "shared")]
    assert both[0].read_bytes() == both[1].read_bytes()


def recipe_of(job, batches):
    path = job.write_recipe(batches)
    path.write_text(
        path.read_text().replace("rewards =", "algorithm.kl_coef = 0.1\nreference.update_every = 2\nrewards =")
    )
    return path


PPO = """algorithm = { kind = "ppo", critic_warmup = 1, reward_kl_coef = 0.1 }
trainer.critic = { lr = 0.02, export = true }"""


def ppo_recipe(job, batches, kind="fsdp"):
    path = job.write_recipe(batches)
    text = path.read_text().replace('algorithm.kind = "grpo"', PPO).replace("export = false }", "every = 2 }")
    path.write_text(text.replace('trainer.kind = "fsdp"', f'trainer.kind = "{kind}"'))


def start(folder, *settings):
    command = [
        sys.executable,
        "-m",
        "plasmid_cli",
        "train",
        "digits.toml",
        "checkpoint.at_end=true",
        "trainer.lr=0.03",
        *settings,
    ]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def curve(folder):
    entries = read_journal(folder / "metrics.jsonl")
    return [{k: v for k, v in e.metrics.items() if k.startswith(("train/", "reward/"))} for e in entries]


def finish(process):
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


@pytest.mark.long
def test_a_reference_with_its_own_process_trains_the_same_and_resumes_exactly(job):
    recipe_of(job, 4)
    finish(start(job.folder, "run.dir=shared"))
    finish(start(job.folder, "run.dir=apart", "placement.reference_ranks=1", "run.batches=3"))
    finish(start(job.folder, "run.dir=apart", "placement.reference_ranks=1", "--resume"))
    assert curve(job.folder / "apart") == curve(job.folder / "shared")
    second, third, fourth = curve(job.folder / "apart")[1:]
    assert second["train/grad_norm"] and third["train/kl"] == 0 and fourth["train/kl"], "the reference has moved once"
    assert (job.folder / "apart/logs/reference-0.log").exists()
    assert not (job.folder / "shared/logs/reference-0.log").exists()
    assert list((job.folder / "apart/checkpoints").glob("batch-*/trainer-reference/model.safetensors"))


def kill(process, name, run_dir, *, batches):
    """Kill a process of the run by its name after this many batches: the run ends with its name."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count("\n") < batches:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    [victim] = (one for one in children if Path(os.readlink(f"/proc/{one.pid}/fd/1")).stem == name)
    victim.kill()
    _, errors = process.communicate(timeout=200)
    assert process.returncode == EXIT_RETRY and "Traceback" not in errors, errors
    [line] = (line for line in errors.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: {name} died during "), line


@pytest.mark.long
def test_a_killed_reference_ends_the_run_with_its_name(job):
    recipe_of(job, 1000)
    process = start(job.folder, "placement.reference_ranks=1")
    kill(process, "reference-0", job.folder / "runs/digits", batches=1)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_a_critic_with_its_own_process_learns_the_same_also_after_it_was_killed(job, kind):
    ppo_recipe(job, 12, kind)
    finish(start(job.folder, "run.dir=shared"))
    apart = job.folder / "apart"
    kill(start(job.folder, "run.dir=apart", "placement.critic_ranks=1"), "critic-0", apart, batches=3)
    [saved, *_] = sorted((apart / "checkpoints").glob("batch-*"))
    assert {"trainer", "trainer-critic"} <= {folder.name for folder in saved.iterdir()}
    finish(start(job.folder, "run.dir=apart", "placement.critic_ranks=1", "--resume"))
    assert curve(apart) == curve(job.folder / "shared")
    values = [entry["train/critic_grad_norm"] for entry in curve(apart)]
    assert len(values) == 12 and all(values[2:])
    assert (apart / "logs/critic-0.log").exists()
    both = [job.folder / name / "final-critic/model.safetensors" for name in ("apart", "shared")]
    assert both[0].read_bytes() == both[1].read_bytes()
