"""Reward that compares a number in the text with the target."""

from __future__ import annotations

import re
from collections import deque
from decimal import Context, Decimal, DecimalException
from typing import Annotated, ClassVar, Literal

from plasmid import Prompt, Reward, Sample, Score
from plasmid.errors import RewardError
from plasmid.settings.trust import INERT
from pydantic import Field

from ..targets import read_targets

NUMBER = re.compile(
    r"(?:(?<![\w).])[-+\u2212])?"  # a sign, unless it stands between two operands as in 3-5
    r"(?:(?<!\w)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"  # 1,234.5 or .5, not the 2 of x2
    r"(?:[eE][-+]?\d+)?",
    re.ASCII,
)
MAX_NUMBER_LENGTH = 400
"""Maximum length of a number, in characters. Python would take long to convert longer ones."""
EXACT = Context(prec=2 * MAX_NUMBER_LENGTH, Emax=10**6, Emin=-(10**6))


class Number(Reward):
    """1.0 if the first or last number of the text equals the target, else 0.0; also 0.0 if there is no number.

    Accepts ``-3``, ``1,234.5``, ``.5`` and ``2e3``. A target may be a number, a string (its last number counts) or a
    list of either.
    """

    kind: Literal["number"] = "number"
    reads_target: ClassVar[bool] = True
    pick: Literal["first", "last"] = "last"
    """Which number of the text is the answer."""
    after: Annotated[str, INERT] = ""
    """Search only after the last occurrence of this text, for example ``####``. A text without it has no number."""
    tolerance: float = Field(1e-6, ge=0, allow_inf_nan=False)
    """Largest absolute difference from the target that still counts as correct."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        targets = [self._target(prompt, target) for target in read_targets(prompt, self.kind)]
        answer = find_number(sample.text, pick=self.pick, after=self.after)
        if answer is None:
            return Score(value=0.0, components={"found": 0.0}, error="no number in the text")
        right = any(self._is_close(answer, target) for target in targets)
        return Score(value=float(right), components={"found": 1.0})

    def _target(self, prompt: Prompt, target: object) -> Decimal:
        number = None if isinstance(target, bool) else find_number(str(target))
        if number is None:
            raise RewardError(
                f"number: prompt {prompt.id} has the target {str(target)[:100]!r}, which contains no number"
            )
        return number

    def _is_close(self, answer: Decimal, target: Decimal) -> bool:
        try:
            return abs(EXACT.subtract(answer, target)) <= Decimal(self.tolerance)
        except DecimalException:
            return False


def find_number(text: str, *, pick: Literal["first", "last"] = "last", after: str = "") -> Decimal | None:
    """Return the first or last number after the last occurrence of ``after``; None if there is none."""
    if after:
        _, found, text = text.rpartition(after)
        if not found:
            return None
    matches = NUMBER.finditer(text)
    match = next(matches, None) if pick == "first" else next(iter(deque(matches, maxlen=1)), None)
    if match is None or len(match[0]) > MAX_NUMBER_LENGTH:
        return None
    try:
        return EXACT.create_decimal(match[0].replace(",", "").replace("\u2212", "-"))
    except DecimalException:
        return None
