"""Is the boxed answer the same quantity as the target?"""

from __future__ import annotations

import logging
from typing import Literal

from plasmid import Prompt, Score
from plasmid.errors import RewardError
from pydantic import Field

from .boxed_text import last_boxed, unboxed
from .extras import needed
from .pooled import PooledReward
from .targets import accepted

LONGEST = 1000
"""Characters of an answer. Longer ones are no answer, and parsers would take long to say so."""


class Math(PooledReward):
    r"""1.0 if the last ``\boxed{...}`` equals the target as mathematics, else 0.0, also if there is no box.

    Equality is that of math-verify: ``\frac{1}{2}`` is ``0.5``, ``3x+1`` is ``1+3x``, sets have no order. A target may
    stand in a box, be a number, or be a list of which one must be met. An answer that takes too long to compare,
    like a tower of powers, gets 0.0 and a reason.
    """

    kind: Literal["math"] = "math"
    decimals: int = Field(6, ge=1, le=15)
    """Decimal places to which numbers that are not exact must agree."""

    def warm(self) -> None:
        verify = needed("math_verify", extra="math", kind=str(self.kind))
        # it says in every call that its own deadline is off; ours replaces it
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # what the parser builds at its first use is then there in every fork
        for text in (r"\boxed{\frac{1}{2}}", r"\boxed{x^2+1}", r"\boxed{\{1,2\}}"):
            verify.verify(verify.parse(text, parsing_timeout=None), verify.parse(text, parsing_timeout=None))

    def judge(self, prompt: Prompt, text: str) -> Score:
        targets = self._targets(prompt)
        answer = last_boxed(text)
        if not answer:
            return Score(value=0.0, components={"found": 0.0}, error="no box with an answer")
        if len(answer) > LONGEST:
            return Score(value=0.0, components={"found": 0.0}, error=f"the answer has more than {LONGEST} characters")
        return Score(value=float(any(self.equal(t, answer) for t in targets)), components={"found": 1.0})

    def _targets(self, prompt: Prompt) -> list[str]:
        targets = [unboxed(str(target)) for target in accepted(prompt, str(self.kind))]
        if not all(targets):
            raise RewardError(f"{self.kind}: prompt {prompt.id} has an empty target; leave the row out")
        return targets

    def equal(self, target: str, answer: str) -> bool:
        """Whether two answers in LaTeX are the same quantity. Takes its time; runs in a worker."""
        if "".join(target.split()) == "".join(answer.split()):
            return True
        verify = needed("math_verify", extra="math", kind=str(self.kind))
        try:
            gold, given = (verify.parse(f"\\boxed{{{t}}}", parsing_timeout=None) for t in (target, answer))
            same = verify.verify(gold, given, float_rounding=self.decimals, timeout_seconds=None)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001  boundary: a parser may fail in any way on what a policy writes
            return False
        return bool(same)
