"""Contract checks for plugin authors: built-in components pass them, and components that break a contract fail."""

import asyncio
from typing import Literal

import numpy as np
import pytest
from plasmid import Filter, Reward, Workflow
from plasmid.testing.contracts import check_trainer
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig, FakeTrainer
from plasmid.testing.light_contracts import check_filter, check_reward
from plasmid.testing.rewards import make_prompt
from plasmid_serving.testing.contract import check_engine
from plasmid_workflows.builtin_workflows import SingleTurn
from plasmid_workflows.testing import check_workflow


def test_the_plain_workflow_satisfies_its_contract():
    asyncio.run(check_workflow(SingleTurn()))


class Counting(Reward):
    kind: Literal["counting"] = "counting"
    how: str = "count"
    _calls: int = 0

    async def __call__(self, prompt, sample):
        self._calls += 1
        return float("nan") if self.how == "nan" else float(self._calls)

    def in_order(self):
        return self.how in ("ordered", "forgets", "binary")

    def state(self):
        return {"calls": {"binary": b"1"}.get(self.how, self._calls)} if self._calls else {}

    def restore(self, state):
        self._calls = 0 if self.how == "forgets" else state["calls"]


def test_a_reward_that_counts_its_calls_in_order_passes():
    check_reward(Counting(how="ordered"), make_prompt())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("count", "depends on earlier calls"),
        ("nan", "is nan"),
        ("forgets", "state must return the same keys after restore"),
        ("binary", "state must return JSON types"),
    ],
)
def test_a_reward_that_breaks_a_promise_is_found(how, message):
    with pytest.raises(AssertionError, match=message):
        check_reward(Counting(how=how), make_prompt())


class Vague(Filter):
    kind: Literal["vague"] = "vague"

    def __call__(self, group):
        return None


def test_a_filter_that_returns_neither_true_nor_false_is_found():
    with pytest.raises(AssertionError, match="must return True or False, got None"):
        check_filter(Vague())


class Careless(Workflow):
    kind: Literal["careless"] = "careless"

    async def run(self, rollout, prompt):
        completion = await rollout.generate(prompt.token_ids)
        sample = rollout.sample(prompt, [completion])
        return [rollout.sample(prompt, [completion], loss_mask=np.ones(len(sample.token_ids), np.bool_))]


def test_a_workflow_that_trains_on_the_prompt_is_found():
    with pytest.raises(AssertionError, match="the loss mask must only contain tokens sampled by the policy"):
        asyncio.run(check_workflow(Careless()))


def test_an_engine_that_answers_while_it_is_paused_is_found():
    engine = FakeEngine(FakeEngineConfig(num_tokens=4))
    with pytest.raises(AssertionError, match="a paused engine must not sample tokens"):
        asyncio.run(check_engine(engine, token_ids=[5, 6]))


class Forgetful(FakeTrainer):
    async def load(self, path):
        return None


def test_a_trainer_that_does_not_load_is_found(tmp_path):
    with pytest.raises(AssertionError, match="load must restore the number of steps"):
        asyncio.run(check_trainer(Forgetful(), folder=tmp_path))


def test_the_fake_trainer_satisfies_its_contract(tmp_path):
    asyncio.run(check_trainer(FakeTrainer(), folder=tmp_path))
