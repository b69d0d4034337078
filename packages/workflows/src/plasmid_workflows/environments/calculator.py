"""Questions that a calculator helps with."""

from __future__ import annotations

from typing import Literal

from plasmid.components.interaction import Environment, Episode, Step
from plasmid.types import Prompt

from ..tools.builtin.arithmetic import evaluate
from .answers import command, is_right


class Calculator(Environment):
    """Evaluates ``calc: 2+3``; ``answer: 5`` ends the episode, with reward 1 if it is the prompt's target."""

    kind: Literal["calculator"] = "calculator"

    def episode(self) -> Episode:
        return CalculatorEpisode()


class CalculatorEpisode:
    """One question."""

    def reset(self, seed: int, prompt: Prompt) -> str:
        self._prompt = prompt
        return ""

    def step(self, action: str) -> Step:
        word, rest = command(action, ("calc", "answer"))
        if word == "answer":
            return Step(reward=float(is_right(self._prompt, rest)), done=True, info={"answer": rest[:200]})
        if word == "calc":
            try:
                return Step(observation=str(evaluate(rest)))
            except ValueError as error:
                return Step(observation=f"error: {error}")
        return Step(observation="write calc: or answer:")

    def close(self) -> None:
        """Nothing is open."""
