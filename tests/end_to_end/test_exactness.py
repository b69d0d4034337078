"""Exact resume and exact replay of real runs, bit by bit."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plasmid.config.load import merge, resolve
from plasmid.types.runs import Mode
from plasmid_cli.comparison.runs import compare_runs
from plasmid_cli.reports.run_data import load_run
from plasmid_runtime.checkpoint.folder import CheckpointFolder, read_state
from plasmid_runtime.checkpoint.saver import BUFFER, IN_FLIGHT
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.sample_store import read_samples
from plasmid_runtime.rollout.in_flight import read_turns

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
    loop = {"steps_per_batch": 2, "batches": 3}
    settings = SETTINGS | {"eval": [], "run": loop}
    job.run(settings | {"run": loop | {"dir": str(job.folder / "whole")}})
    job.run(settings)
    shutil.rmtree(job.folder / "run" / "checkpoints" / "batch-000003")
    job.run(settings, resume=True)
    assert len(job.metrics()) == 3
    assert curve(job.metrics()) == curve(job.metrics("whole"))
    assert samples(job.folder / "run") == samples(job.folder / "whole")


def test_the_same_recipe_twice_gives_equal_metrics_and_samples(job):
    """Except times and memory, on the CPU with `max_staleness = 0`, with the real trainer and engine."""
    for name in ("first", "second"):
        job.run(SETTINGS | {"run": {"steps_per_batch": 2, "batches": 2, "dir": str(job.folder / name)}})
    found = compare_runs(*(load_run(job.folder / name) for name in ("first", "second")))
    assert (found.num_equal, found.difference, found.settings, found.environment) == (2, "", [], [])
    assert found.weights_after == 2
    assert samples(job.folder / "first") == samples(job.folder / "second")


STATEFUL = Path(__file__).parents[1] / "every_third.py"
REMEMBERING = '''
from typing import Literal
from plasmid import Reward, hookimpl

class Unusual(Reward):
    """How much more digits an answer has than those before it."""
    kind: Literal["unusual"] = "unusual"
    _sum: float = 0.0
    _count: int = 0
    async def __call__(self, prompt, sample):
        share = sum(c.isdigit() for c in sample.text) / max(1, sample.num_generated)
        mean = self._sum / max(1, self._count)
        self._sum, self._count = self._sum + share, self._count + 1
        return share - mean
    def state(self):
        return {"sum": self._sum, "count": self._count}
    def restore(self, state):
        self._sum, self._count = state["sum"], state["count"]

@hookimpl
def register_components():
    return [Unusual]
'''


@pytest.mark.long
def test_a_resume_is_exact_with_everything_that_remembers(job):
    """Reward, filter, curriculum, old groups, reference, optimizer and random states of the real trainer and engine."""
    plugin = job.folder / "remembering.py"
    plugin.write_text(REMEMBERING)
    settings = SETTINGS | {
        "plugins": [*job.plain()["plugins"], str(plugin), str(STATEFUL)],
        "rewards": [{"kind": "digit-share"}, {"kind": "unusual", "weight": 0.5}],
        "filters": [{"kind": "every-third"}],
        "algorithm": {"old_policy": "rollout", "kl_coef": 0.5},
        "reference": {"update_every": 2},
        "reuse": {"groups_per_batch": 2},
    }
    source = {"kind": "files", "path": str(job.folder / "train.jsonl")}
    plain = job.plain() | {"data": {"kind": "curriculum", "source": source, "pass_threshold": 0.5}}

    def start(folder="run", **mode):
        config = resolve(merge(plain, settings | {"run": {"steps_per_batch": 2, "dir": str(job.folder / folder)}}))
        run(config, mode=Mode(**mode), make_cluster=lambda _: LocalCluster())

    start("whole")
    start()
    for late in ("batch-000004", "batch-000006"):
        shutil.rmtree(job.folder / "run" / "checkpoints" / late)
    start(resume=True)
    assert curve(job.metrics()) == curve(job.metrics("whole"))
    assert samples(job.folder / "run") == samples(job.folder / "whole")


def test_a_replay_is_bit_identical_when_repeated_and_to_the_run_itself(job):
    job.run({"run": {"batches": 2}, "eval": []})
    for name in ("first", "second"):
        job.run({"eval": [], "run": {"dir": str(job.folder / name)}}, replay=job.folder / "run")
    assert curve(job.metrics("first")) == curve(job.metrics("second"))
    losses = [[m["train/loss"] for m in job.metrics(name)] for name in ("first", "run")]
    assert losses[0] == losses[1]


def remove(folder):
    """Remove a folder into which ending processes may still write logs."""
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
        "import json, sys, pathlib; from plasmid.config.load import resolve; import plasmid; "
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
        remove(folder)  # killed before the first save: nothing to resume, the run starts over
        assert start("begin").wait(timeout=240) == 0
    else:
        assert start("resume").wait(timeout=240) == 0
    assert curve(job.metrics()) == curve(job.metrics("whole"))


IN_FLIGHT_SETTINGS = {
    "checkpoint": {"every": 1, "keep_last": 100, "export": False},
    "sampling": {"max_new_tokens": 40, "temperature": 3.0},
    "rollout": {"max_batch": 2},
    "algorithm": {"old_policy": "rollout"},
}


def check_in_flight(run, turns):
    """Check that tokens sampled before a checkpoint are in the samples of the resumed run; return their number."""
    newest = CheckpointFolder.list_complete(run / "checkpoints")[-1]
    files = [*(run / "samples").glob("batch-*.parquet"), *([newest / BUFFER] if (newest / BUFFER).exists() else [])]
    groups = [group for file in files for group in read_samples(file)]
    ids = [group.id for group in groups]
    waiting = [item["id"] for item in read_state(newest).producer["pending"]]
    assert sorted([*ids, *waiting]) == list(range(read_state(newest).producer["next"]))
    known = {sample.rollout_id: (sample, len(group.prompt.token_ids)) for group in groups for sample in group.samples}
    found = 0
    for turn in (turn for job in turns.values() for turn in job if turn.rollout_id in known):
        sample, start = known[turn.rollout_id]
        part = slice(start, start + len(turn.completion.token_ids))
        assert sample.token_ids[part].tolist() == turn.completion.token_ids.tolist()
        assert sample.rollout_logprobs[part].tolist() == turn.completion.logprobs.tolist()
        assert sample.versions[0].version == turn.completion.versions[0].version
        found += 1
    return found


def test_rollouts_in_flight_go_on_after_a_resume(job):
    """With the real engine: their first tokens come from the previous policy, with its log-probabilities."""
    settings = IN_FLIGHT_SETTINGS | {"eval": []}
    run = {"max_staleness": 1, "prompts_per_batch": 2}
    job.run(settings | {"run": {**run, "batches": 2}})
    checkpoint = job.folder / "run/checkpoints/batch-000001"
    turns = read_turns(checkpoint / IN_FLIGHT)
    shutil.rmtree(job.folder / "run/checkpoints/batch-000002")
    job.run(settings | {"run": {**run, "batches": 3}}, resume=True)
    assert check_in_flight(job.folder / "run", turns) == sum(map(len, turns.values())) > 0
