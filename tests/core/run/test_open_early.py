"""Rewards that open while the engine starts."""

import asyncio

import plasmid.testing.fakes
import pytest
from plasmid_rewards.code.reward import Code
from plasmid_rewards.combine import Isolated
from plasmid_rewards.mathematics.math_answer import Math
from plasmid_rewards.text.rules import ExactMatch
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.rollout.scored.scoring import opens_early

WAIT_S = 60
PLUGIN = '''
from pathlib import Path
from typing import ClassVar, Literal
from plasmid import Reward, hookimpl

class Early(Reward):
    """Writes when it opens."""
    kind: Literal["early"] = "early"
    opens_early: ClassVar[bool] = True
    file: str
    """File to append to."""

    async def open(self, context):
        with Path(self.file).open("a") as file:
            file.write(f"{self.kind} {'engine' if context.engine else 'no engine'}\\n")

    async def __call__(self, prompt, sample):
        return 0.0

class Derived(Early):
    """Has its own method."""
    kind: Literal["derived"] = "derived"

    async def open(self, context):
        await super().open(context)

@hookimpl
def register_components():
    return [Early, Derived]
'''


@pytest.mark.parametrize("evaluates", [False, True])
def test_rewards_that_need_no_engine_open_while_it_starts(runner, tmp_path, monkeypatch, evaluates):
    """The engine of this test is only ready once they are open."""
    file, before = tmp_path / "opened", []
    (tmp_path / "early.py").write_text(PLUGIN)
    plugins = [str(tmp_path / "early.py"), plasmid.testing.fakes.__file__]
    rewards = [{"kind": kind, "file": str(file)} for kind in ("derived", "early")]
    evaluations = [{"name": "held-out", "data": {"path": str(tmp_path / "prompts.jsonl")}}] if evaluates else []
    config = runner.config({"plugins": plugins, "rewards": rewards, "run": {"batches": 1}, "eval": evaluations})
    engine = type(config.rollout)
    build = engine.build

    async def slow_build(self, context):
        async with asyncio.timeout(WAIT_S):
            while not file.exists():
                await asyncio.sleep(0.01)
        before.append(file.read_text())
        return await build(self, context)

    monkeypatch.setattr(engine, "build", slow_build)
    run(config, make_cluster=lambda _: LocalCluster())
    assert before == ["early no engine\n"]
    assert file.read_text() == "early no engine\nderived engine\n"


def test_which_rewards_open_early():
    assert all(map(opens_early, (Math, Isolated, Code)))
    assert not opens_early(ExactMatch)
