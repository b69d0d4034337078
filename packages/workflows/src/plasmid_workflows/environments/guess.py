"""A game: find a number."""

from __future__ import annotations

import random
import re
from typing import Literal

from plasmid.components.interaction import Environment, Episode, Step
from plasmid.types import Prompt
from pydantic import Field


class Guess(Environment):
    """Draws a number; each guess is answered by ``higher`` or ``lower``, until it is found.

    All rollouts of one prompt look for the same number.
    """

    kind: Literal["guess"] = "guess"
    highest: int = Field(9, ge=1)
    """Numbers go from 1 to this."""
    cost: float = Field(0.0, ge=0)
    """What each guess that misses costs; finding the number pays 1."""
    announce: bool = False
    """Begin by saying where the numbers end; otherwise the prompt says what there is to say."""

    def episode(self) -> Episode:
        return GuessEpisode(self)


class GuessEpisode:
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

    def close(self) -> None:
        """Nothing is open."""
