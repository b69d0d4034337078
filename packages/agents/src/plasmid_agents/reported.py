"""The reward `reported`: a value returned by the agent."""

from __future__ import annotations

import math
from typing import Literal

from plasmid.components import Reward
from plasmid.types import Prompt, Sample, Score

MAX_PARTS = 32
"""Maximum number of entries in an agent's ``metrics`` that become components of its reward."""


class Reported(Reward):
    """A number in the agent's result: from functions, services, and environments of other libraries."""

    kind: Literal["reported"] = "reported"
    key: str = "reward"
    """Key of the number in the agent's result."""
    missing: float = 0.0
    """Reward of a sample whose agent returned no finite number. The sample store records the reason."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        value = sample.metadata.get(self.key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return Score(
                value=self.missing,
                error=f"the agent must return a finite number as {self.key!r}, got {value!r:.80}",
            )
        found = sample.metadata.get("metrics")
        parts = list(found.items())[:MAX_PARTS] if isinstance(found, dict) else ()
        components = {
            str(name)[:64]: float(part)
            for name, part in parts
            if isinstance(part, int | float) and not isinstance(part, bool) and math.isfinite(part)
        }
        return Score(value=float(value), components=components)
