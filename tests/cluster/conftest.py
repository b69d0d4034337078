"""Ray clusters of several nodes on this machine, each with its own temporary folder, and a recipe for them."""

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
SECOND = "127.0.0.2"
"""Address of the second machine; Ray determines that of the first."""
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
def register_components():
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
        """Start `rl train` on it as a process."""
        command = [BIN / "rl", "train", "job.toml", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environment, **pipes, **options)

    def train(self, *arguments, environment):
        """Run `rl train`; return its exit code and output."""
        process = self.begin(*arguments, environment=environment)
        out, _ = process.communicate()
        return process.returncode, out

    def machines(self):
        """Return where rewards were computed, and the path of the plugin file there."""
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
def plain_environment():
    """Return the environment for Ray's commands and `rl`: a folder for Ray, and no variables of other clusters."""
    with ray_environment() as environment:
        yield environment


@contextlib.contextmanager
def ray_environment():
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PLASMID_"))}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # a short path: socket paths must not exceed 107 characters
    ray = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        yield {**own, "PATH": path, **ray}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Cluster:
    """A running cluster."""

    address: str
    environment: dict[str, str]
    """Environment of drivers that join it."""
    process: subprocess.Popen

    @property
    def first(self):
        """Return the address of the first machine."""
        return self.address.partition(":")[0]

    def add(self, **node):
        """Add a node; returns when the cluster knows it."""
        self.process.stdin.write(json.dumps(node) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "added"


@contextlib.contextmanager
def cluster_of(*nodes, **variables):
    """Start a cluster with these nodes and environment variables."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, NODES, json.dumps(nodes)]
    with (
        ray_environment() as environment,
        subprocess.Popen(command, env={**environment, **variables}, **pipes) as process,
    ):
        try:
            address = process.stdout.readline().strip()
            assert address, "the cluster did not start"
            yield Cluster(address, {**environment, "RAY_ADDRESS": address}, process)
        finally:
            process.stdin.close()  # ends the cluster
            process.wait()


@pytest.fixture(name="cluster_of")
def _cluster_of():
    return cluster_of


@pytest.fixture(scope="module")
def two_machines():
    """A cluster of two machines."""
    node = {"num_cpus": 3, "num_gpus": 3}
    with cluster_of(node, {**node, "node_ip_address": SECOND}) as cluster:
        yield cluster
