"""Environments that come with Plasmid."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from plasmid.components.interaction import Environment, Episode, Step
from plasmid.settings.trust import INERT
from plasmid.types import Prompt
from pydantic import Field, field_validator

from .tools.builtin.arithmetic import evaluate
from .tools.builtin.corpus import open_corpus
from .tools.builtin.tools import check_file, format_hits


def find_command(action: str, words: Iterable[str]) -> tuple[str, str]:
    """Return the last command ``word: argument`` in an action as (word, argument); two empty strings without one.

    ``words`` are the known commands. The argument ends with the line.
    """
    names = "|".join(map(re.escape, words))
    found = re.findall(rf"(?:^|[^\w])({names})\s*:[ \t]*([^\n]*)", action, re.IGNORECASE)
    return (found[-1][0].lower(), found[-1][1].strip()) if found else ("", "")


def is_right(prompt: Prompt, answer: str) -> bool:
    """Return whether the answer equals the prompt's target, or one of them. Numbers are compared as numbers.

    Raises `ValueError` if there is no target.
    """
    targets = prompt.target if isinstance(prompt.target, list | tuple) else [prompt.target]
    if not targets or None in targets:
        raise ValueError(f"prompt {prompt.id} has no target; set data.target_key to the column of targets")
    return any(_same(target, answer) for target in targets)


def _same(target: Any, answer: str) -> bool:
    left, right = (" ".join(str(value).casefold().split()).strip(" .") for value in (target, answer))
    try:
        return float(left) == float(right)
    except ValueError:
        return left == right


class Calculator(Environment):
    """Evaluates ``calc: 2+3``; ``answer: 5`` ends the episode, with reward 1 if it is the prompt's target."""

    kind: Literal["calculator"] = "calculator"

    def episode(self) -> Episode:
        return CalculatorEpisode()


class CalculatorEpisode(Episode):
    """One question."""

    def reset(self, seed: int, prompt: Prompt) -> str:
        self._prompt = prompt
        return ""

    def step(self, action: str) -> Step:
        word, rest = find_command(action, ("calc", "answer"))
        if word == "answer":
            return Step(reward=float(is_right(self._prompt, rest)), done=True, info={"answer": rest[:200]})
        if word == "calc":
            try:
                return Step(observation=str(evaluate(rest)))
            except ValueError as error:
                return Step(observation=f"error: {error}")
        return Step(observation="write calc: or answer:")


class Guess(Environment):
    """Draws a number and answers each guess with ``higher`` or ``lower`` until it is found.

    All rollouts of one prompt guess the same number.
    """

    kind: Literal["guess"] = "guess"
    highest: int = Field(9, ge=1)
    """Largest number; the smallest is 1."""
    cost: float = Field(0.0, ge=0)
    """Penalty for each wrong guess. The correct guess gives 1."""
    announce: bool = False
    """Announce the range of numbers in the first observation. If false, the prompt must describe the game."""

    def episode(self) -> Episode:
        return GuessEpisode(self)


class GuessEpisode(Episode):
    """One number."""

    def __init__(self, rules: Guess) -> None:
        self._rules = rules

    def reset(self, seed: int, prompt: Prompt) -> str:
        self._secret = random.Random(seed).randint(1, self._rules.highest)
        return f"guess a number from 1 to {self._rules.highest}" if self._rules.announce else ""

    def step(self, action: str) -> Step:
        found = re.search(r"\d{1,9}", action)
        if found is None:
            return Step(observation="a number, please", reward=-self._rules.cost)
        guess = int(found[0])
        if guess == self._secret:
            return Step(reward=1.0, done=True)
        return Step(observation="higher" if guess < self._secret else "lower", reward=-self._rules.cost)


class Search(Environment):
    """Answers ``search: words`` with documents; ``answer: text`` ends the episode, with reward 1 for the target."""

    kind: Literal["search"] = "search"
    corpus: Annotated[str, INERT]
    """File of documents: ``.jsonl`` with ``text`` (and ``title``), or plain text with one document per paragraph."""
    limit: int = Field(3, ge=1)
    """Maximum number of documents per search."""

    _check_file = field_validator("corpus")(check_file)

    async def open(self, context: Any) -> None:
        open_corpus(self.corpus)

    def episode(self) -> Episode:
        return SearchEpisode(self)


class SearchEpisode(Episode):
    """One question."""

    def __init__(self, settings: Search) -> None:
        self._settings = settings
        self._searches = 0

    def reset(self, seed: int, prompt: Prompt) -> str:
        self._prompt = prompt
        return ""

    def step(self, action: str) -> Step:
        word, rest = find_command(action, ("search", "answer"))
        if word == "answer":
            right = float(is_right(self._prompt, rest))
            return Step(reward=right, done=True, info={"answer": rest[:200], "searches": self._searches})
        if word == "search":
            self._searches += 1
            return Step(
                observation=format_hits(open_corpus(self._settings.corpus).search(rest, limit=self._settings.limit))
            )
        return Step(observation="write search: or answer:")
