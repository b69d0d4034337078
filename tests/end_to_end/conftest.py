"""Whole runs with the real trainer and the real engine on tiny models."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plasmid.config.load import merge, resolve
from plasmid.types import Sample
from plasmid.types.runs import Mode, RunResult
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples

FAMILIES = str(Path(__file__).parent.parent / "backend_megatron")
if FAMILIES not in sys.path:
    sys.path.insert(0, FAMILIES)  # modules of helpers that create tiny models

REWARD = '''
from typing import Literal
from plasmid import Reward, hookimpl

class DigitShare(Reward):
    """Share of the answer's characters that are digits."""
    kind: Literal["digit-share"] = "digit-share"
    async def __call__(self, prompt, sample):
        return sum(c.isdigit() for c in sample.text) / max(1, sample.num_generated)

@hookimpl
def register_components():
    return [DigitShare]
'''


@dataclass
class Job:
    """A recipe in a folder, with which a tiny model learns to answer in digits."""

    folder: Path
    model: Path

    def plain(self) -> dict[str, Any]:
        """Write the recipe's files and return the recipe as plain data."""
        plugin = self.folder / "digit_share.py"
        plugin.write_text(REWARD)
        for name, rows in (("train", range(40)), ("test", range(40, 56))):
            lines = [json.dumps({"prompt": f"say {row}: ", "target": row}) + "\n" for row in rows]
            (self.folder / f"{name}.jsonl").write_text("".join(lines))
        return {
            "recipe": "digits",
            "model": {"path": str(self.model)},
            "plugins": [str(plugin)],
            "run": {"dir": str(self.folder / "run"), "batches": 6, "prompts_per_batch": 4, "samples_per_prompt": 4},
            "sampling": {"max_new_tokens": 4},
            "data": {"path": str(self.folder / "train.jsonl")},
            "trainer": {"kind": "fsdp", "lr": 3e-3},
            "rollout": {"kind": "hf"},
            "algorithm": {"kind": "grpo"},
            "rewards": [{"kind": "digit-share"}],
            "eval": [{"name": "held-out", "data": {"path": str(self.folder / "test.jsonl")}}],
        }

    def write_recipe(self, batches: int) -> Path:
        """Write a small recipe as a file for the `rl` command, to be run in `folder`."""
        self.plain()
        path = self.folder / "digits.toml"
        path.write_text(
            f"""
            plugins = ["digit_share.py"]
            model.path = "{self.model}"
            trainer.kind = "fsdp"
            rollout.kind = "hf"
            algorithm.kind = "grpo"
            rewards = [{{ kind = "digit-share" }}]
            sampling.max_new_tokens = 2
            data.path = "train.jsonl"
            run = {{ batches = {batches}, prompts_per_batch = 2, samples_per_prompt = 2 }}
            checkpoint = {{ at_end = false, export = false }}
            """
        )
        return path

    def config(self, changes: dict[str, Any] | None = None):
        return resolve(merge(self.plain(), changes or {}))

    def run(self, changes: dict[str, Any] | None = None, **mode: Any) -> RunResult:
        """Run it in this process."""
        return run(self.config(changes), mode=Mode(**mode), make_cluster=lambda _: LocalCluster())

    def metrics(self, name: str = "run") -> list[dict[str, float]]:
        return [dict(entry.metrics) for entry in read_journal(self.folder / name / "metrics.jsonl")]


@pytest.fixture(scope="package", autouse=True)
def unmeasured_memory():
    """Do not add up the memory of this process, which takes 10 to 20 ms in each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plasmid_runtime.observe.system._pss", lambda processes: 0.0)
        yield


@pytest.fixture
def job(tmp_path, tiny_model) -> Job:
    return Job(tmp_path, tiny_model)


@pytest.fixture(scope="session")
def two_processes():
    """Two processes for ranks."""
    from tests.backend_fsdp.fsdp_processes import Processes

    processes = Processes(2)
    yield processes
    processes.shutdown()


@pytest.fixture(params=["openai", pytest.param("sglang", marks=pytest.mark.long)])
def server(request, job, teacher):
    """A server of the module's `teacher`."""
    from tests.core.rollout.model_server import ModelServer

    made = ModelServer(teacher, job.plain(), sglang=request.param == "sglang")
    yield made
    made.close()


def stored(folder: Path) -> list[Sample]:
    """Return the samples in a run's files, in order."""
    files = sorted((folder / "samples").glob("batch-*.parquet"))
    return [sample for file in files for group in read_samples(file) for sample in group.samples]
