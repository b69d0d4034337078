"""Reward that verifies answers to reasoning-gym tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from plasmid import Prompt, Score
from plasmid.errors import RewardError

from ..mathematics.boxed_text import find_last_boxed, strip_thinking
from ..pooled import PooledReward
from . import entries

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
RIGHT = 0.99
"""Minimum score of a correct answer: verifiers that compare numbers return values just below 1 for correct answers."""


class ReasoningGym(PooledReward):
    """1.0 if the family's own verifier accepts the answer, else 0.0; also 0.0 if the text has no answer.

    For prompts of the data source ``reasoning-gym``, or rows with a column ``reasoning_gym`` that holds
    ``{"family", "seed", "options"}``. Plasmid replaces the verifiers of two families that accept wrong answers.
    """

    kind: Literal["reasoning-gym"] = "reasoning-gym"
    answer_in: Literal["tags", "box", "last-line", "last-number", "whole"] = "tags"
    """Where to find the answer: in the last ``<answer>``, in the last box, ... Verifiers expect the bare answer."""
    partial: bool = False
    """Return the verifier's value between 0 and 1 unchanged. Some verifiers give partial credit, and a few reward
    brevity."""

    def packages(self) -> Mapping[str, str]:
        return {"reasoning_gym": "plasmid-rewards[reasoning-gym]"}

    def warm(self) -> None:
        entries.families()

    def prepare(self, prompt: Prompt) -> None:
        family, seed, options = _entry(prompt)
        entries.make(family, seed, options)

    def judge(self, prompt: Prompt, text: str) -> Score:
        answer = self.answer(strip_thinking(text))
        if answer is None:
            return Score(
                value=0.0, components={"found": 0.0}, error=f"no answer found (answer_in = {self.answer_in!r})"
            )
        value = entries.score(*_entry(prompt), answer)
        return Score(
            value=value if self.partial else float(value >= RIGHT), components={"verifier": value, "found": 1.0}
        )

    def answer(self, text: str) -> str | None:
        """Extract the answer from a text; None if there is none."""
        if self.answer_in == "whole":
            return text.strip()
        if self.answer_in == "box":
            return find_last_boxed(text)
        if self.answer_in == "last-line":
            return text.strip().rpartition("\n")[2].strip() or None
        if self.answer_in == "last-number":
            numbers = NUMBER.findall(text)
            return numbers[-1].replace(",", "") if numbers else None
        _, opened, after = text.rpartition("<answer>")
        content, closed, _ = after.partition("</answer>")
        return content.strip() if opened and closed else None


def _entry(prompt: Prompt) -> tuple[str, int, Mapping[str, Any]]:
    place = prompt.metadata.get(entries.KEY)
    if not isinstance(place, Mapping) or not isinstance(place.get("family"), str):
        raise RewardError(
            f"reasoning-gym: prompt {prompt.id} has no {entries.KEY!r} with family, seed and options; set "
            '[data] kind = "reasoning-gym"'
        )
    seed, options = place.get("seed", 0), place.get("options") or {}
    if not isinstance(seed, int) or not isinstance(options, Mapping):
        raise RewardError(f"reasoning-gym: prompt {prompt.id}: seed must be an integer, options a table, got {place!r}")
    return place["family"], seed, options
