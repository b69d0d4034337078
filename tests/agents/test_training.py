"""Whole runs: the embedded engine behind HTTP, agents with OpenAI's client, and training on their samples."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from plasmid.config.load import merge, resolve
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal

PLUGIN = '''
from typing import Literal
from plasmid import Reward, hookimpl

class Digits(Reward):
    """Share of the answer's characters that are digits."""
    kind: Literal["digits"] = "digits"
    async def __call__(self, prompt, sample):
        return sum(c.isdigit() for c in sample.text) / max(1, len(sample.text))

@hookimpl
def register_components():
    return [Digits]
'''
AGENT = '''
import sys
import httpx
import openai

HTTP = httpx.Client(verify=False)  # certificates are read once, not for every rollout

def run(prompt):
    """Ask twice; the second turn goes on from the first."""
    assert "openai.resources.chat.completions" in sys.modules, "each fork imports it anew"
    client = openai.OpenAI(max_retries=0, http_client=HTTP)
    messages = [{"role": "user", "content": prompt}]
    for turn in range(2):
        reply = client.chat.completions.create(model="policy", messages=messages)
        messages.append(reply.choices[0].message.model_dump(include={"role", "content"}))
        messages.append({"role": "user", "content": "again"})
    return messages[-2]["content"]
'''
PLAIN_AGENT = '''
import json, os, urllib.request

def run(prompt):
    """Ask twice, like the agent with OpenAI's client, whose import takes a second."""
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    messages = [{"role": "user", "content": prompt}]
    for turn in range(2):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body)))["choices"][0]["message"]
        messages += [{key: reply[key] for key in ("role", "content")}, {"role": "user", "content": "again"}]
    return messages[-2]["content"]

def with_helper(prompt):
    run(prompt)
    return run("help: " + prompt)

def scores_itself(prompt, seed):
    run(prompt)
    turns = [seed % 7 / 7, seed % 5 / 5]
    return {"reward": sum(turns), "turn_rewards": turns}
'''


def make_recipe(folder: Path, model: Path, changes=None):
    """Create a recipe in which a two-turn agent learns to answer in digits."""
    (folder / "digits.py").write_text(PLUGIN)
    (folder / "agent.py").write_text(AGENT)
    (folder / "plain.py").write_text(PLAIN_AGENT)
    for name, rows in (("train", range(40)), ("test", range(40, 52))):
        lines = [json.dumps({"prompt": f"say {row}", "target": row}) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    plain = {
        "recipe": "agents",
        "model": {"path": str(model)},
        "plugins": [str(folder / "digits.py")],
        "run": {"dir": str(folder / "run"), "batches": 2, "prompts_per_batch": 2, "samples_per_prompt": 3},
        "sampling": {"max_new_tokens": 6},
        "data": {"path": str(folder / "train.jsonl"), "prompt_as": "chat"},
        "workflow": {"kind": "agent", "function": f"{folder / 'agent.py'}:run"},
        "trainer": {"kind": "fsdp", "lr": 3e-3},
        "rollout": {"kind": "hf"},
        "algorithm": {"kind": "grpo"},
        "rewards": [{"kind": "digits"}],
    }
    return merge(plain, changes or {})


def train(folder, model, changes=None):
    return run(resolve(make_recipe(folder, model, changes)), make_cluster=lambda _: LocalCluster())


def stored(folder):
    """Return all samples of the run, and its metrics."""
    tables = [pyarrow.parquet.read_table(path) for path in sorted((folder / "run" / "samples").glob("batch-*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist()]
    return rows, [entry.metrics for entry in read_journal(folder / "run" / "metrics.jsonl")]


def test_an_agent_is_trained_by_its_base_url(tmp_path, chat_model):
    assert train(tmp_path, chat_model).steps == 2
    rows, metrics = stored(tmp_path)
    assert len(rows) == 12
    assert [row["error"] for row in rows] == [None] * 12
    for row in rows:
        mask = np.array(row["loss_mask"])
        assert np.flatnonzero(np.diff(mask.astype(int)) == 1).shape == (2,), "two turns are trained on"
    assert max(m["train/logprob_diff_max"] for m in metrics) < 2e-5
    assert any(m["train/grad_norm"] > 0 for m in metrics)


def test_branches_of_one_rollout_count_once(tmp_path, chat_model):
    train(tmp_path, chat_model, {"workflow": {"function": f"{tmp_path / 'plain.py'}:with_helper"}})
    rows, metrics = stored(tmp_path)
    assert len(rows) == 24
    by_rollout = {row["rollout_id"]: [] for row in rows}
    for row in rows:
        by_rollout[row["rollout_id"]].append(row)
    assert len(by_rollout) == 12
    assert all(len({row["reward"] for row in branches}) == 1 for branches in by_rollout.values())
    assert max(m["train/logprob_diff_max"] for m in metrics) < 2e-5


def test_rewards_by_turn_of_an_agent_change_what_is_trained(tmp_path, chat_model):
    changes = {
        "run": {"batches": 1},
        "workflow": {"function": f"{tmp_path / 'plain.py'}:scores_itself"},
        "rewards": [{"kind": "sum", "rewards": [{"kind": "reported", "weight": 2.0}]}],
    }
    norms = []
    for baseline in ("sample", "turn"):
        train(tmp_path, chat_model, changes | {"algorithm": {"baseline": baseline}})
        rows, (metrics,) = stored(tmp_path)
        norms.append(metrics["train/grad_norm"])
        for row in rows:
            ends = np.flatnonzero(np.diff(np.array(row["loss_mask"]).astype(int), append=0) == -1)
            assert [position for position, _ in row["token_rewards"]] == ends.tolist()
            assert sum(value for _, value in row["token_rewards"]) == pytest.approx(row["reward"])
        shutil.rmtree(tmp_path / "run")
    assert norms[0] != norms[1]


@pytest.mark.long
def test_agents_are_trained_in_a_run_that_samples_ahead(tmp_path, chat_model):
    loop = {"max_staleness": 1, "batches": 4}
    train(tmp_path, chat_model, {"run": loop, "sampling": {"max_new_tokens": 24}})
    rows, metrics = stored(tmp_path)
    assert [row["error"] for row in rows] == [None] * len(rows)
    assert max(m["rollout/staleness_max"] for m in metrics) == 1


@pytest.mark.long
def test_a_run_repeats_itself(tmp_path, chat_model):
    seen = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        train(folder, chat_model)
        rows, metrics = stored(folder)
        seen.append(([row["token_ids"] for row in rows], [m["train/loss"] for m in metrics]))
    assert seen[0] == seen[1]


@pytest.mark.long
def test_rl_train_runs_agents_in_separate_processes(tmp_path, chat_model):
    import tomllib

    recipe = make_recipe(tmp_path, chat_model)
    lines = []
    for key, value in recipe.items():
        if key != "recipe":
            lines.append(f"{key} = {toml(value)}")
    (tmp_path / "agents.toml").write_text("\n".join(lines))
    assert tomllib.loads((tmp_path / "agents.toml").read_text())["workflow"]["kind"] == "agent"
    command = [Path(sys.executable).parent / "rl", "train", "agents.toml", "placement.rollout_workers=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, _ = stored(tmp_path)
    assert len(rows) == 12
    assert [row["error"] for row in rows] == [None] * 12


def toml(value):
    """Format a value as an inline table, list or scalar of TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_an_agent_that_is_trained_over_http_improves(tmp_path, chat_model, seed):
    loop = {"seed": seed, "batches": 20, "prompts_per_batch": 4, "samples_per_prompt": 8}
    held_out = {"name": "held-out", "data": {"path": str(tmp_path / "test.jsonl"), "prompt_as": "chat"}}
    result = train(tmp_path, chat_model, {"run": loop, "eval": [{**held_out, "samples_per_prompt": 2}]})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert before < 0.4
    assert after > 0.8
