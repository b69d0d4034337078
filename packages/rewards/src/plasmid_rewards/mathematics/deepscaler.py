"""Reward of the DeepScaleR recipe: a mathematical answer after thinking."""

from __future__ import annotations

from typing import Literal

from plasmid import Score

from .boxed_text import THOUGHT
from .math_answer import Math

ANSWER = "###Response"


class DeepScaler(Math):
    r"""Like ``math``, but only the text after ``</think>`` (or else ``###Response``) counts; 0.0 without either.

    The reward of DeepScaleR (Luo et al. 2025): thinking must have ended, and the boxed answer must follow it.
    """

    kind: Literal["deepscaler"] = "deepscaler"  # type: ignore[assignment]

    def read_answer(self, text: str) -> str | Score:
        _, thought, answer = text.rpartition(THOUGHT)
        if not thought:
            _, thought, answer = text.partition(ANSWER)
        if not thought:
            return Score(value=0.0, components={"found": 0.0}, error=f"no {THOUGHT} and no {ANSWER}")
        return super().read_answer(answer)
