"""The reward `reported`: a value returned by the agent."""

from __future__ import annotations

import math
from typing import Literal, TypeGuard

from plasmid.components import Reward
from plasmid.types import Prompt, Sample, Score

MAX_PARTS = 32
"""Maximum number of entries in an agent's ``metrics`` that become components of its reward."""
TURN_REWARDS = "turn_rewards"
"""Key of the rewards by turn in an agent's result."""


class Reported(Reward):
    """A number in the agent's result: from functions, services, and environments of other libraries.

    If the result has ``turn_rewards``, a list with one number per turn of the policy, each number is assigned to its
    turn.
    """

    kind: Literal["reported"] = "reported"
    key: str = "reward"
    """Key of the number in the agent's result."""
    missing: float = 0.0
    """Reward of a sample whose agent returned no finite number. The sample store records the reason."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        value, tokens = sample.metadata.get(self.key), dict[int, float]()
        if not _is_number(value):
            return self._make_missing_score(f"a finite number as {self.key!r}, got {value!r:.80}")
        if TURN_REWARDS in sample.metadata:
            turns, ends = sample.metadata[TURN_REWARDS], sample.metadata.get("turn_ends", ())
            if not (isinstance(turns, list) and len(turns) == len(ends) and all(map(_is_number, turns))):
                return self._make_missing_score(
                    f"{len(ends)} finite numbers as {TURN_REWARDS!r}, one per turn, got {turns!r:.80}"
                )
            tokens = {end: float(part) for end, part in zip(ends, turns, strict=True) if end is not None}
        found = sample.metadata.get("metrics")
        parts = list(found.items())[:MAX_PARTS] if isinstance(found, dict) else ()
        components = {str(name)[:64]: float(part) for name, part in parts if _is_number(part)}
        return Score(value=float(value), components=components, token_rewards=tokens)

    def _make_missing_score(self, expected: str) -> Score:
        return Score(value=self.missing, error=f"the agent must return {expected}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
