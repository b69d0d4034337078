"""Ray clusters of several nodes on this machine, each with a temporary folder of its own, and a recipe for them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
NODES = Path(__file__).parent / "ray_nodes.py"
REWARD = '''
import os
from pathlib import Path
from typing import Literal
from plasmid import Reward, hookimpl

class Traced(Reward):
    """Share of digits; notes in a shared folder which plugin file it came from, and on which machine."""
    kind: Literal["traced"] = "traced"
    folder: str
    """Where to."""
    async def __call__(self, prompt, sample):
        (Path(self.folder) / os.environ.get("PLASMID_ADDRESS", "alone")).write_text(__file__)
        return sum(c.isdigit() for c in sample.text) / max(1, sample.num_generated)

@hookimpl
def register_rewards():
    return [Traced]
'''
RECIPE = """
plugins = ["traced.py"]
model.path = "{model}"
trainer = {{ kind = "fsdp", lr = 3e-3 }}
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{{ kind = "traced", folder = "{traces}" }}]
sampling.max_new_tokens = 4
data.path = "prompts.jsonl"
checkpoint = {{ at_end = false, export = false }}
run = {{ batches = 2, prompts_per_batch = 4, samples_per_prompt = 4 }}
placement = {{ device = "cpu", trainer_ranks = 2, engine_ranks = 2, rollout_workers = 2, threads = 1 }}
"""


@dataclass
class Job:
    """A recipe in a folder."""

    folder: Path
    traces: Path

    def begin(self, *arguments, environment, **options):
        """`rl train` on it, as a process."""
        command = [BIN / "rl", "train", "job.toml", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environment, **pipes, **options)

    def train(self, *arguments, environment):
        """Exit code and output of `rl train`."""
        process = self.begin(*arguments, environment=environment)
        out, _ = process.communicate()
        return process.returncode, out

    def machines(self):
        """Where rewards were computed, and the plugin file that they came from there."""
        return {trace.name: Path(trace.read_text()) for trace in self.traces.iterdir()}


@pytest.fixture
def job(tmp_path, tiny_model):
    folder, traces = tmp_path / "job", tmp_path / "traces"
    folder.mkdir()
    traces.mkdir()
    (folder / "traced.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "say {i}: ", "target": {i}}}\n' for i in range(40)))
    (folder / "job.toml").write_text(RECIPE.format(model=tiny_model, traces=traces))
    return Job(folder, traces)


@pytest.fixture
def ray_folder():
    """Short: paths of sockets in it must not exceed 107 characters."""
    path = tempfile.mkdtemp(prefix="r", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def plain_environment(ray_folder):
    """For Ray's commands and for `rl`, without a trace of other clusters on this machine."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PLASMID_"))}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**own, "PATH": path, "RAY_TMPDIR": ray_folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass
class Cluster:
    """A running one."""

    address: str
    environment: dict[str, str]
    """Of drivers that are to join it."""
    process: subprocess.Popen

    def add(self, **node):
        """One more node; returns when the cluster knows it."""
        self.process.stdin.write(json.dumps(node) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "added"


@pytest.fixture
def cluster_of(plain_environment):
    """Starts a cluster with these nodes."""
    with contextlib.ExitStack() as stack:

        def start(*nodes):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            command = [sys.executable, NODES, json.dumps(nodes)]
            process = stack.enter_context(subprocess.Popen(command, env=plain_environment, **pipes))
            stack.callback(process.stdin.close)  # which ends it
            address = process.stdout.readline().strip()
            return Cluster(address, {**plain_environment, "RAY_ADDRESS": address}, process)

        yield start
