"""Rewards composed of rewards: their values, their recipes, and errors within them."""

import asyncio
from pathlib import Path
from typing import Literal

import pytest
from plasmid import RunContext, Score
from plasmid.components import Reward
from plasmid.config.load import resolve_with
from plasmid.config.profiles import reward_names
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError, ConfigError, RewardError
from plasmid.plugins.registry import load_plugins
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import Boxed, Dapo, Distinct, ExactMatch, Format, Gate, Number, Part, Product, Sum
from plasmid_runtime.rollout.scored.scoring import Scorer
from pydantic import PrivateAttr

RECIPE = {
    "model": {"path": "model"},
    "trainer": {"kind": "fsdp"},
    "rollout": {"kind": "hf"},
    "algorithm": {"kind": "grpo"},
    "data": {"path": "x.jsonl"},
}
NESTED = {
    "kind": "gate",
    "weight": 2.0,
    "condition": {"kind": "format", "tags": ["answer"]},
    "closed": -1.0,
    "reward": {
        "kind": "sum",
        "rewards": [
            {"kind": "boxed", "reward": {"kind": "number"}},
            {"kind": "distinct", "weight": 0.5},
            {"kind": "product", "rewards": [{"kind": "number"}, {"kind": "exact-match", "where": "anywhere"}]},
        ],
    },
}


def resolve(*rewards) -> RunConfig:
    return resolve_with(load_plugins(), {**RECIPE, "rewards": list(rewards)})


def score(reward, *texts, target=12):
    """Return the result of a run's scorer for these texts of one prompt."""

    async def work():
        scorer = Scorer([reward])
        await scorer.open(RunContext(seed=0, run_dir=Path()))
        samples = [make_sample(text, id=f"0/{i}", num_generated=10) for i, text in enumerate(texts)]
        scored = await scorer.score(make_prompt(target=target), samples)
        await scorer.close()
        return [sample.score for sample in scored]

    return asyncio.run(work())


def test_a_recipe_nests_rewards_and_every_part_is_logged():
    config = resolve(NESTED)
    again = resolve_with(load_plugins(), config.model_dump(mode="json"))
    assert again == config and isinstance(again.rewards[0].reward.rewards[0].reward, Number)
    right, wrong, unformed = score(
        config.rewards[0], r"<answer>\boxed{12}</answer>", "<answer>12 or 13</answer>", r"\boxed{12}"
    )
    assert right.value == 2 * (1 + 0.5 + 1) and wrong.value == 2 * 0.5 and unformed.value == -2
    assert right.components == {
        "gate": 2.5,
        "gate.condition.format": 1.0,
        "gate.open": 1.0,
        "gate.sum": 2.5,
        "gate.sum.boxed": 1.0,
        "gate.sum.boxed.found": 1.0,
        "gate.sum.distinct": 1.0,
        "gate.sum.product": 1.0,
        "gate.sum.product.number": 1.0,
        "gate.sum.product.number.found": 1.0,
        "gate.sum.product.exact-match": 1.0,
    }
    assert unformed.components == {"gate": -1.0, "gate.condition.format": 0.0, "gate.open": 0.0}


class Turns(Reward):
    """Rewards two tokens: the first with 0.5, the last with the length of the text."""

    kind: Literal["turns"] = "turns"

    async def __call__(self, prompt, sample):
        return Score(value=len(sample.text) + 0.5, token_rewards={0: 0.5, sample.num_generated - 1: len(sample.text)})


def by_turn(reward, text="abc"):
    (found,) = score(reward, text)
    return found.value, found.token_rewards


def test_a_sum_adds_the_rewards_of_turns_with_the_weights_of_its_parts():
    parts = (Turns(weight=2.0), Distinct(), Turns(weight=-1.0))
    expected = 2.0 * 3.5 + 1.0 - 3.5, {0: 0.5, 9: 3.0}
    assert by_turn(Sum(rewards=parts), "abc") == expected
    assert by_turn(Sum(rewards=parts, weight=4.0), "abc") == (4 * expected[0], {0: 2.0, 9: 12.0})
    assert by_turn(Sum(rewards=(Distinct(), Distinct(name="again")))) == (2.0, {})


def test_a_gate_and_a_box_keep_the_rewards_of_turns():
    gate = Gate(condition=Format(tags=("a",)), reward=Turns(), closed=-1.0)
    assert by_turn(gate, "<a>b</a>") == (8.5, {0: 0.5, 9: 8.0})
    assert by_turn(gate, "b") == (-1.0, {})
    assert by_turn(Boxed(reward=Turns()), r"\boxed{ab}") == (2.5, {0: 0.5, 9: 2.0})


def test_the_value_of_a_product_has_no_parts_by_turn():
    assert by_turn(Product(rewards=(Turns(), Turns(name="again")))) == (12.25, {})


def test_a_sum_of_rewards_of_turns_that_is_no_float_is_a_failure():
    class Huge(Reward):
        kind: Literal["huge"] = "huge"

        async def __call__(self, prompt, sample):
            return Score(value=0.0, token_rewards={0: 1e308, 1: -1e308})

    (whole,) = score(Sum(rewards=(Huge(weight=10.0),)), "a")
    (listed,) = score(Huge(weight=10.0), "a")
    assert (whole.value, whole.error) == (0.0, "token_rewards has inf at position 0; it must be finite")
    assert (listed.value, listed.error) == (0.0, "the sum of the rewards is too large for a float")
    assert whole.token_rewards == listed.token_rewards == {}


def test_unnamed_rewards_of_one_kind_are_numbered():
    rewards = [ExactMatch(), Number(), ExactMatch(), ExactMatch(name="strict"), ExactMatch()]
    assert reward_names(rewards) == ["exact-match-0", "number", "exact-match-1", "strict", "exact-match-2"]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"kind": "gate", "condition": {"kind": "fromat"}, "reward": {"kind": "number"}},
            "rewards.0.condition.kind: 'fromat' is not installed; did you mean 'format'?",
        ),
        (
            {"kind": "boxed", "reward": {"kind": "number", "tolerence": 1}},
            "rewards.0.reward.tolerence: no such setting; did you mean 'tolerance'?",
        ),
        (
            {"kind": "sum", "rewards": [{"kind": "number"}, {"kind": "number", "tolerance": -1}]},
            "rewards.0.rewards.1.tolerance: must be at least 0, got -1",
        ),
        (
            {"kind": "boxed", "reward": {"kind": "sum", "rewards": [{"kind": "regex"}]}},
            "rewards.0.reward.rewards.0.pattern: is required",
        ),
        ({"kind": "boxed"}, "rewards.0.reward: is required"),
        ({"kind": "boxed", "reward": 3}, "rewards.0.reward: must be a table, got 3"),
        ({"kind": "sum", "rewards": {"kind": "number"}}, "rewards.0.rewards: must be a list, got {'kind': 'number'}"),
        ({"kind": "sum", "rewards": []}, "rewards.0.rewards: must have at least 1 item, got []"),
        ({"kind": "sum", "rewards": [3]}, "rewards.0.rewards.0: must be a table with a kind, got 3"),
        (
            {"kind": "product", "rewards": [{"kind": "number"}, {"kind": "number", "weight": 2}]},
            "rewards.0: weight = 2 of 'number' has no effect in a combined reward; remove it",
        ),
        (
            {"kind": "boxed", "reward": {"kind": "number", "weight": 2}},
            "rewards.0.reward: weight = 2 of 'number' has no effect in a combined reward; remove it",
        ),
    ],
)
def test_errors_within_a_reward_name_their_place(reward, message):
    with pytest.raises(ConfigError) as error:
        resolve(reward)
    assert str(error.value).splitlines() == [message]


def test_several_errors_within_a_reward_are_reported_at_once():
    wrong = {"kind": "gate", "condition": {"kind": "x"}, "reward": {"kind": "number", "y": 1}, "z": 1}
    with pytest.raises(ConfigError) as error:
        resolve(wrong, {"kind": "number", "w": 1})
    places = [line.split(":")[0] for line in str(error.value).splitlines()]
    assert places == ["rewards.0.condition.kind", "rewards.0.reward.y", "rewards.0.z", "rewards.1.w"]


def test_boxed_gate_part_and_product():
    assert [s.value for s in score(Boxed(reward=Number(), missing=-0.5), r"1 \boxed{12} 13", "12")] == [1.0, -0.5]
    gate = Gate(condition=Number(), at_least=1.0, reward=Distinct())
    assert [s.value for s in score(gate, "12", "12", "a 12", "13", "13")] == [0.5, 0.5, 1.0, 0.0, 0.0]
    part = Part(reward=Dapo(), key="accuracy")
    assert [s.value for s in score(part, "Answer: 12", "Answer: 13", "12")] == [1.0, 0.0, 0.0]
    product = Product(rewards=(Number(), ExactMatch(where="end")))
    assert [s.value for s in score(product, "12", "12.", "13")] == [1.0, 0.0, 0.0]
    both = Sum(rewards=(Number(weight=2.0), Number(weight=-0.5)))
    (given,) = score(both, "12")
    assert given.value == 1.5 and {"sum.number-0", "sum.number-1"} <= set(given.components)


def test_a_component_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(RewardError) as error:
        score(Part(reward=Dapo(), key="acc"), "Answer: 12")
    assert str(error.value) == "part: 'dapo' has no component 'acc'; its components are accuracy, found"


class Stateful(Reward):
    """Counts its calls."""

    kind: Literal["stateful"] = "stateful"
    _count: int = PrivateAttr(0)
    _open: list[str] = PrivateAttr(default_factory=list)

    async def open(self, context):
        self._open.append("open")

    async def close(self):
        self._open.append("close")

    def state(self):
        return {"count": self._count}

    def restore(self, state):
        self._count = state["count"]

    async def __call__(self, prompt, sample):
        self._count += 1
        if sample.text == "slow":
            await asyncio.sleep(9)
        return float("inf") if sample.text == "inf" else Score(value=float(self._count))


def test_rewards_within_are_opened_closed_saved_and_restored():
    inner = Stateful()
    outer = Gate(condition=Sum(rewards=(inner,)), reward=Number())
    score(outer, "a", "b")
    assert inner._open == ["open", "close"]
    state = outer.state()
    assert state == {"0": {"0": {"count": 2}}, "1": {}}
    fresh = Stateful()
    Gate(condition=Sum(rewards=(fresh,)), reward=Number()).restore(state)
    assert fresh._count == 2


def test_a_reward_within_whose_state_is_no_mapping_is_named(monkeypatch):
    monkeypatch.setattr(Stateful, "state", lambda self: None)
    with pytest.raises(CheckpointError, match=r"reward 'stateful' in 'sum': its state must be a mapping, got None"):
        Gate(condition=Sum(rewards=(Stateful(),)), reward=Number()).state()


def test_rewards_within_keep_their_own_deadline_and_must_be_finite():
    with pytest.raises(
        RewardError, match=r"stateful: no score for sample 0/0 within timeout_s = 0.1; make the reward faster"
    ):
        score(Boxed(reward=Stateful(timeout_s=0.1)), r"\boxed{slow}")
    with pytest.raises(RewardError, match="stateful: must return a finite number or a Score, got inf for sample 0/0"):
        score(Boxed(reward=Stateful()), r"\boxed{inf}")


def test_the_reward_behind_a_gate_is_not_asked_about_closed_samples():
    inner = Stateful()
    score(Gate(condition=Format(), reward=inner), "a", "<answer>b</answer>", "c")
    assert inner._count == 1
