"""Built-in environments and tools satisfy their contract checks, and those that break a promise are found."""

import asyncio
import random
from typing import Literal

import pytest
from plasmid.components.interaction import Environment, Step, Tool
from plasmid_workflows.builtin_environments import Calculator, Guess, Search
from plasmid_workflows.testing import check_environment, check_tool
from plasmid_workflows.tools.builtin.tools import CalculatorTool


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text('{"title": "Elbe", "text": "The Elbe flows through Dresden."}\n')
    return str(path)


def test_built_in_environments_satisfy_the_contract(corpus):
    for environment in (Guess(), Guess(announce=True), Calculator(), Search(corpus=corpus)):
        asyncio.run(check_environment(environment))


class Faulty(Environment):
    """Ends with the first action, with one fault."""

    kind: Literal["faulty"] = "faulty"
    fault: str = ""

    def episode(self):
        return FaultyEpisode(self.fault)


class FaultyEpisode:
    def __init__(self, fault):
        self.fault = fault

    def reset(self, seed, prompt):
        return None if self.fault == "reset" else str(random.random() if self.fault == "random" else seed)

    async def step(self, action):
        reward = float("nan") if self.fault == "nan" else float(int(action)) if self.fault == "int" else 0.0
        reward = "1.0" if self.fault == "text" else reward
        info = {"info": {"seen": {action}}, "pairs": [("seen", 1)]}.get(self.fault, {})
        return ("", 0.0) if self.fault == "step" else Step(reward=reward, info=info, done=True)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("reset", AssertionError, "reset must return text, got None"),
        ("random", AssertionError, "reset must return the same observation for the same seed"),
        ("nan", AssertionError, r"step\(''\) must return a finite reward, got nan"),
        ("text", AssertionError, r"step\(''\) must return a finite reward, got '1.0'"),
        ("pairs", AssertionError, r"step\(''\) must return info as a mapping, got \[\('seen', 1\)\]"),
        ("int", ValueError, "invalid literal"),
        ("info", AssertionError, r"step\(''\) must return info as JSON types"),
        ("step", AssertionError, r"step\(''\) must return a Step, got \('', 0.0\)"),
    ],
)
def test_an_environment_that_breaks_a_promise_is_found(fault, error, message):
    asyncio.run(check_environment(Faulty()))
    with pytest.raises(error, match=message):
        asyncio.run(check_environment(Faulty(fault=fault)))


class Any_(Tool):
    """Returns the function of a test."""

    kind: Literal["any"] = "any"

    def implementation(self):
        return function


function = None


def undocumented(text: str):
    return text


def unannotated(text):
    """Return the text."""


def broken(text: str):
    """Return the text."""
    raise ValueError("no text")


def test_the_calculator_satisfies_the_contract():
    assert check_tool(CalculatorTool(), {"expression": "2 * 3"}) == "6"


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (undocumented, "undocumented must have a docstring"),
        (unannotated, "argument 'text' must have a type annotation"),
        (broken, "a call with {'text': 'a'} must not fail: error: ValueError: no text"),
    ],
)
def test_a_tool_that_breaks_a_promise_is_found(faulty, message, monkeypatch):
    monkeypatch.setattr(f"{__name__}.function", faulty)
    with pytest.raises(AssertionError, match=message):
        check_tool(Any_(), {"text": "a"})
