"""Mathematics after thinking, as the DeepScaleR recipe asks for it."""

from __future__ import annotations

from typing import Literal

from plasmid import Prompt, Score

from .boxed_text import THOUGHT
from .math_answer import Math

ANSWER = "###Response"


class DeepScaler(Math):
    r"""Like ``math``, but only what follows ``</think>`` (or else ``###Response``) counts; without either, 0.0.

    The reward of DeepScaleR (Luo et al. 2025): thinking must have ended, and the answer must be boxed after it.
    """

    kind: Literal["deepscaler"] = "deepscaler"  # type: ignore[assignment]

    def judge(self, prompt: Prompt, text: str) -> Score:
        _, thought, answer = text.rpartition(THOUGHT)
        if not thought:
            _, thought, answer = text.partition(ANSWER)
        if not thought:
            return Score(value=0.0, components={"found": 0.0}, error=f"no {THOUGHT} and no {ANSWER}")
        return super().judge(prompt, answer)
