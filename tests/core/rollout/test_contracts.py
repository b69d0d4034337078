"""Contract checks for plugin authors: built-in components pass them, and components that break a contract fail."""

import asyncio
from typing import Literal

import numpy as np
import pytest
from plasmid import Filter, Reward, Score, Workflow
from plasmid.testing.contracts import check_trainer
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig, FakeTrainer
from plasmid.testing.light_contracts import check_filter, check_reward
from plasmid.testing.rewards import make_prompt
from plasmid_serving.testing.contract import check_engine
from plasmid_workflows.builtin_workflows import SingleTurn
from plasmid_workflows.testing import Digits, check_workflow


def test_the_plain_workflow_satisfies_its_contract():
    asyncio.run(check_workflow(SingleTurn()))


class Counting(Reward):
    kind: Literal["counting"] = "counting"
    how: str = "count"
    _calls: int = 0

    async def __call__(self, prompt, sample):
        self._calls += 1
        if self.how == "writes":
            sample.token_ids[0] = 0
        if self.how == "position":
            return Score(value=1.0, token_rewards={len(sample.token_ids): 1.0})
        if self.how == "pairs":
            return Score(value=1.0, token_rewards=((0, 1.0),))
        return float("nan") if self.how == "nan" else float(self._calls)

    def in_order(self):
        return self.how in ("ordered", "forgets", "binary", "stateless")

    def state(self):
        if self.how == "stateless":
            return None
        return {"calls": {"binary": b"1"}.get(self.how, self._calls)} if self._calls else {}

    def restore(self, state):
        self._calls = 0 if self.how == "forgets" else state["calls"]


def test_a_reward_that_counts_its_calls_in_order_passes():
    check_reward(Counting(how="ordered"), make_prompt())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("count", "depends on earlier calls"),
        ("nan", "the score of '': counting: must return a finite number or a Score, got nan for sample 0/0"),
        ("position", "token_rewards has position 1, and the sample has 1 tokens"),
        ("pairs", r"counting: token_rewards must be a mapping, got \(\(0, 1.0\),\) \(tuple\) for sample 0/0"),
        ("writes", "arrays of samples are read-only in runs; change a copy: ValueError: assignment destination is"),
        ("stateless", "state must return a mapping, got None"),
        ("forgets", "state must return the same keys after restore"),
        ("binary", "state must return JSON types"),
    ],
)
def test_a_reward_that_breaks_a_promise_is_found(how, message):
    with pytest.raises(AssertionError, match=message):
        check_reward(Counting(how=how), make_prompt())


class Vague(Filter):
    kind: Literal["vague"] = "vague"
    writes: bool = False

    def __call__(self, group):
        if self.writes:
            group.samples[0].loss_mask[0] = False


def test_a_filter_that_returns_neither_true_nor_false_is_found():
    with pytest.raises(AssertionError, match="must return True or False, got None"):
        check_filter(Vague())
    with pytest.raises(AssertionError, match="arrays of samples are read-only in runs; change a copy"):
        check_filter(Vague(writes=True))


class Careless(Workflow):
    kind: Literal["careless"] = "careless"
    how: str = ""

    async def run(self, rollout, prompt):
        completion = await rollout.generate(prompt.token_ids)
        sample = rollout.sample(prompt, [completion])
        mask = np.ones(len(sample.token_ids), np.bool_)
        changes = {
            "prompt": {"loss_mask": np.arange(len(mask)) > 0},
            "first": {"loss_mask": mask},
            "token": {"token_ids": np.full_like(sample.token_ids, 17)},
            "text": {"text": b"4"},
            "metadata": {"metadata": ["4"]},
            "id": {"id": "mine"},
        }
        sample = rollout.sample(prompt, [completion], **changes.get(self.how, {}))
        return {"bare": sample, "twice": [sample, sample], "none": []}.get(self.how, [sample])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("prompt", "the loss mask must only contain tokens sampled by the policy"),
        ("first", "loss_mask of sample 3/1.1 contains the first token, which has no log-probability"),
        ("token", "token_ids of sample 3/1.1 must be from 0 to 16, got 17"),
        ("text", "text of sample 3/1.1 must be a string, got b'4'"),
        ("metadata", r"metadata of sample 3/1.1 must be a mapping, got \['4'\]"),
        ("id", "id of a sample must start with the rollout's id, which makes it unique in a run, got 'mine'"),
        ("twice", "a workflow must return samples with distinct ids, got"),
        ("bare", "a workflow must return a list of samples, got one value of type Sample"),
        ("none", "a workflow must return at least one sample"),
    ],
)
def test_a_workflow_that_breaks_a_promise_is_found(how, message):
    asyncio.run(check_workflow(Careless()))
    with pytest.raises(AssertionError, match=f"^{message}"):
        asyncio.run(check_workflow(Careless(how=how)))


def test_the_vocabulary_of_a_checked_workflow_can_be_given():
    asyncio.run(check_workflow(Careless(how="token"), vocab_size=18))
    asyncio.run(check_workflow(Careless(how="token"), codec=Digits()))


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
