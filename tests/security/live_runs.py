"""Runs that are attacked while they are running, and what other processes can find out about them."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from plasmid.testing import fakes

from tests.security.rl_command import RL

KNOWN = "a-token-that-the-attacker-knows"
WAITING = '''
import subprocess, time
from pathlib import Path
from typing import Literal
from plasmid import Reward, hookimpl

class Waiting(Reward):
    """Notes what a program that it starts inherits, then keeps the run where it is."""
    kind: Literal["waiting"] = "waiting"
    async def __call__(self, prompt, sample):
        if not Path("inherited").exists():
            Path("inherited").write_text(subprocess.run(["env"], capture_output=True, text=True).stdout)
        time.sleep(3600)
        return 0.0

@hookimpl
def register_components():
    return [Waiting]
'''
WAITING_RECIPE = """
plugins = ["waiting.py", "{fakes}"]
model.path = "{model}"
rollout.kind = "{engine}"
trainer.kind = "{trainer}"
algorithm.kind = "{algorithm}"
rewards = [{{ kind = "waiting", timeout_s = 3600 }}]
sampling.max_new_tokens = 4
data.path = "prompts.jsonl"
run = {{ batches = 2, prompts_per_batch = 1, samples_per_prompt = 2 }}
placement = {{ device = "cpu", trainer_ranks = {ranks}, rollout_workers = 1, threads = 1 }}
"""
FAKES = {"engine": "fake", "trainer": "fake", "algorithm": "fake", "ranks": 1}
RANKS = {"engine": "hf", "trainer": "fsdp", "algorithm": "grpo", "ranks": 2}
"""Parts of a run without and with processes that import torch."""


class Run:
    """A running `rl train`."""

    def __init__(self, folder, temporary, process):
        self.folder, self.temporary, self.process = folder, temporary, process

    def output(self):
        return (self.folder / "output").read_text()

    def processes(self):
        """Return its process and all descendants; none once it has ended."""
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def commands(self):
        """Return process -> command line of the processes that have not ended."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[process] = " ".join(process.cmdline())
        return found

    def ports(self):
        """Return address and port -> command line of all listening sockets of the run's processes."""
        found = {}
        for process, command in self.commands().items():
            found.update(dict.fromkeys(listening(process), command))
        return found

    def wait_for(self, is_reached):
        """Wait until ``is_reached`` returns True. Raises `AssertionError` if the run ends before."""
        while not is_reached():
            assert self.process.poll() is None, self.output()
            time.sleep(0.2)

    def batches(self):
        """Return the number of trained batches."""
        file = self.folder / "run" / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def train_more(self, count=1):
        """Wait until it has trained on more batches."""
        wanted = self.batches() + count
        self.wait_for(lambda: self.batches() >= wanted)

    def end(self):
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        shutil.rmtree(self.temporary)


def listening(process):
    """Return [(address, port)] of its listening sockets; none once it has ended."""
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]


def reachable(place):
    """Return host and port by which a process on the same machine reaches a listening socket."""
    host, port = place
    return {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(host, host.removeprefix("::ffff:")), port


def write_prompts(folder, count):
    rows = [json.dumps({"prompt": f"say {i}", "target": i}) for i in range(count)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def start(folder, *overrides, **environment):
    """Start `rl train job.toml` with its own folder for Ray's sockets."""
    temporary = tempfile.mkdtemp(prefix="r", dir="/tmp")
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (folder / "output").open("w") as output:
        process = psutil.Popen(
            [*RL, "train", "job.toml", *overrides],
            cwd=folder,
            env={**own, "RAY_TMPDIR": temporary, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Run(folder, Path(temporary), process)


def make_waiting_job(folder, model, parts=RANKS):
    (folder / "waiting.py").write_text(WAITING)
    (folder / "job.toml").write_text(WAITING_RECIPE.format(model=model, fakes=fakes.__file__, **parts))
    write_prompts(folder, 8)


def start_waiting(folder, **environment):
    """Start the run; returns when the first reward is being computed."""
    run = start(folder, **environment)
    run.wait_for((folder / "inherited").exists)
    return run
