"""Numbers in the results of rewards: which types are accepted, and how others are reported."""

import asyncio
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from plasmid import Reward, RunContext, Score
from plasmid.errors import RewardError
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import Sum
from plasmid_runtime.rollout.scored.scoring import Scorer
from pydantic import PrivateAttr


class Returning(Reward):
    """Returns a fixed result."""

    kind: Literal["returning"] = "returning"
    _result: Any = PrivateAttr(None)

    async def __call__(self, prompt, sample):
        return self._result


def score(result, *, nested=False):
    reward = Returning()
    reward._result = result

    async def work():
        scorer = Scorer([Sum(rewards=(reward,)) if nested else reward])
        await scorer.open(RunContext(seed=0, run_dir=Path()))
        (scored,) = await scorer.score(make_prompt(), [make_sample("text", num_generated=4)])
        return scored.score

    return asyncio.run(work())


HALVES = [
    0.5,
    Fraction(1, 2),
    np.float32(0.5),
    np.float64(0.5),
    np.array(0.5, np.float16),
    torch.tensor(0.5, requires_grad=True),
    torch.tensor(0.5, dtype=torch.bfloat16),
]
ONES = [1, True, np.int64(1), np.bool_(True), np.array(1), torch.tensor(1), torch.tensor(True)]


@pytest.mark.parametrize(
    ("given", "expected"), [*((half, 0.5) for half in HALVES), *((one, 1.0) for one in ONES)], ids=repr
)
def test_every_type_of_number_becomes_a_float(given, expected):
    for found in (score(given), score(given, nested=True), score(Score(value=given))):
        assert type(found.value) is float and found.value == expected
    whole = score(Score(value=0, components={"part": given}, token_rewards={1: given}))
    assert whole.components == {"returning": 0.0, "returning.part": expected} and whole.token_rewards == {1: expected}
    assert {type(value) for value in (*whole.components.values(), *whole.token_rewards.values())} == {float}


OTHERS = [
    (None, "None"),
    ("0.5", "'0.5' (str)"),
    (math.nan, "nan"),
    (-math.inf, "-inf"),
    (1j, "1j (complex)"),
    (Decimal("0.5"), "Decimal('0.5') (Decimal)"),
    (np.float32("nan"), "np.float32(nan) (float32)"),
    (np.array([0.5]), "array([0.5]) (ndarray)"),
    (np.zeros((2, 1)), "array([[0.],        [0.]]) (ndarray)"),
    (np.array(1j), "array(0.+1.j) (ndarray)"),
    (torch.tensor([0.5]), "tensor([0.5000]) (Tensor)"),
    (torch.tensor(math.inf), "tensor(inf) (Tensor)"),
]


@pytest.mark.parametrize(("given", "shown"), OTHERS, ids=repr)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x, "must return a finite number or a Score"),
        (lambda x: Score(value=x), "the value of a Score must be a finite number"),
        (lambda x: Score(value=1.0, components={"part": x}), "component 'part' must be a finite number"),
    ],
    ids=["result", "value", "component"],
)
def test_anything_else_is_an_error_with_its_value_and_type(given, shown, make, expected):
    with pytest.raises(RewardError) as caught:
        score(make(given))
    assert str(caught.value) == f"rewards.0 (returning): {expected}, got {shown} for sample 0/0"


def test_the_name_of_a_component_must_be_a_string():
    with pytest.raises(RewardError, match=r"the name of a component must be a string, got 3 \(int\) for sample 0/0"):
        score(Score(value=1.0, components={3: 1.0}))


def test_a_reward_of_a_token_must_be_a_number():
    with pytest.raises(RewardError, match=r"token_rewards must be finite numbers; at position 0, got 'a' \(str\) for"):
        score(Score(value=1.0, token_rewards={0: "a"}))


@pytest.mark.parametrize("huge", [10**400, 10**5000, Fraction(10**400)], ids=["int", "digits", "fraction"])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda x: x, "the score"),
        (lambda x: Score(value=1.0, components={"part": x}), "a component"),
        (lambda x: Score(value=1.0, token_rewards={0: x}), "a reward of a token"),
    ],
    ids=["result", "component", "token"],
)
def test_a_number_too_large_for_a_float_is_a_failure_of_the_sample(huge, make, what):
    found = score(make(huge))
    assert (found.value, found.error) == (0.0, f"{what} is too large for a float")
