"""Environments of verifiers and OpenEnv, with the real libraries in environments that `make environments` builds."""

import asyncio
import json
import os
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agent_cases import ScriptedEngine, make_rollout
from plasmid import load_config
from plasmid.protocols import RunContext
from plasmid.settings.validation import validate
from plasmid.testing.rewards import make_prompt
from plasmid_agents.environments.workflows import OpenEnv, Verifiers
from plasmid_agents.reported import Reported
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal
from plasmid_workflows.execution import execute

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(os.environ.get("PLASMID_ENVIRONMENTS", ROOT / "build" / "environments"))
pytestmark = pytest.mark.long

TASKSET = """
import re
from collections.abc import Iterable
import verifiers.v1 as vf

class SumsData(vf.TaskData):
    answer: int

class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        found = re.search(r"\\d+", trace.last_reply or "")
        return float(found is not None and int(found[0]) == self.data.answer)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))

class SumsTaskset(vf.Taskset[SumsTask]):
    def load(self) -> Iterable[SumsTask]:
        for a in range(1, 4):
            yield SumsTask(SumsData(prompt=f"What is {a}+1?", answer=a + 1), self.config.task)

__all__ = ["SumsTaskset"]
"""
SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    message: str

class Hint(Observation):
    text: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.steps = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.steps = 0
        return Hint(text="guess", reward=0.0, done=False)

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        right = action.message == "7"
        return Hint(text="more", reward=1.0 if right else -0.25, done=right or self.steps == 3)

    @property
    def state(self):
        return State(step_count=self.steps)

app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def interpreter(library: str) -> str:
    path = ENVIRONMENTS / library / "bin" / "python"
    if not path.exists():
        pytest.skip(f"no {path}; make environments builds it")
    return str(path)


def roll_out(tokenizer, kind, settings, script, metadata):
    async def main():
        workflow = validate(kind, settings)
        await workflow.open(RunContext(seed=1, run_dir=Path()))
        try:
            engine = ScriptedEngine(tokenizer, script)
            runs = [
                execute(
                    workflow,
                    make_rollout(tokenizer, engine, name=f"5/{index}"),
                    replace(make_prompt("play"), text="play", messages=(), metadata=row),
                    120.0,
                )
                for index, row in enumerate(metadata)
            ]
            return [samples[-1] for samples in await asyncio.gather(*runs)]
        finally:
            await workflow.close()

    return asyncio.run(main())


def as_toml(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(as_toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def score(sample):
    return asyncio.run(Reported()(make_prompt(), sample))


@pytest.fixture
def sums(tmp_path, monkeypatch) -> dict:
    (tmp_path / "sums_taskset.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    return {
        "kind": "verifiers",
        "python": interpreter("verifiers"),
        "env": {"taskset": {"id": "sums_taskset"}, "agent": agent},
    }


def test_a_taskset_of_verifiers_is_played_and_judged(tokenizer, sums):
    rows = [json.loads(line) for line in validate(Verifiers, sums).list_tasks().splitlines()]
    assert rows[0] == {"prompt": [{"role": "user", "content": "What is 1+1?"}], "task": 0}
    samples = roll_out(tokenizer, Verifiers, sums, lambda _: "It is 3.", [{"task": row["task"]} for row in rows])
    assert [sample.error for sample in samples] == [None] * 3
    assert [score(sample).value for sample in samples] == [0.0, 1.0, 0.0]
    assert score(samples[1]).components == {"correct": 1.0, "letters": 8.0}
    assert samples[1].text == "It is 3." and "What is 2+1?" in tokenizer.decode(samples[1].token_ids)


def test_a_tiny_model_trains_in_an_environment_of_verifiers(chat_model, sums, tmp_path):
    (tmp_path / "tasks.jsonl").write_text(validate(Verifiers, sums).list_tasks())
    settings = {
        "model.path": str(chat_model),
        "run": {"dir": str(tmp_path / "run"), "batches": 1, "prompts_per_batch": 2, "samples_per_prompt": 2},
        "sampling.max_new_tokens": 4,
        "data": {"path": "tasks.jsonl", "target_key": "none", "prompt_as": "chat"},
        "trainer": {"kind": "fsdp", "dtype": "float32"},
        "rollout": {"kind": "hf", "dtype": "float32"},
        "algorithm.kind": "grpo",
        "rewards": [{"kind": "reported"}],
        "checkpoint.export": False,
        "workflow": sums,
    }
    config = load_config([], [f"{key}={as_toml(value)}" for key, value in settings.items()])
    assert run(config, make_cluster=lambda _: LocalCluster()).steps == 1
    (entry,) = read_journal(tmp_path / "run" / "metrics.jsonl")
    assert entry.metrics["rollout/failed"] == 0.0
    assert entry.metrics["reward/reported.letters"] > 0.0


def test_a_server_of_openenv_is_played(tokenizer, tmp_path):
    python = interpreter("openenv")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, str(tmp_path / "server.py"), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        settings = {"kind": "openenv", "python": python, "url": f"http://127.0.0.1:{port}", "observation": "text"}
        samples = roll_out(
            tokenizer,
            OpenEnv,
            settings,
            lambda said: "7" if said.count("more") else "5",
            [{"level": i} for i in range(2)],
        )
    finally:
        server.kill()
        server.wait()
    assert [sample.error for sample in samples] == [None, None]
    assert [score(sample).value for sample in samples] == [0.75, 0.75]
    assert score(samples[0]).components == {"steps": 2.0, "done": 1.0}
    assert list(score(samples[0]).token_rewards.values()) == [-0.25, 1.0]
    assert samples[0].metadata["turns"] == 2
