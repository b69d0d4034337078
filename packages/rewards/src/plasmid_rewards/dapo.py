"""The answer line of DAPO's mathematics."""

from __future__ import annotations

import re
from decimal import Decimal, DecimalException
from typing import Literal

from plasmid import Prompt, Reward, Sample, Score
from pydantic import Field

from .boxed_text import last_boxed
from .targets import accepted

LINE = re.compile(r"answer\s*:\s*([^\n]*)", re.IGNORECASE)
WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|overline|boxed|fbox)\{([^{}]*)\}")
UNITS = re.compile(
    r"(?<![a-z\\])(?:square|cubic|units?|degrees?|dollars?|cents?|percent|points?|people|minutes?|hours?|seconds?|days?"
    r"|inches|feet|miles|meters|cm|km|mph|edges|ways)(?![a-z])"
)
NOISE = re.compile(r"\\(?:left|right|[!,;: ])|\\%|\\\$|\^\\circ|\^\{\\circ\}|[$%\s]")
SHORT_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}|(\w))(?:\{([^{}]+)\}|(\w))")
SHORT_ROOT = re.compile(r"\\sqrt(\w)")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Dapo(Reward):
    """1.0 if the last ``Answer: ...`` line is the target, else -1.0, also if there is no such line.

    The reward of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476). Both sides are brought to a plain form
    (units, LaTeX wrappers, ``a = 3`` as ``3``, digit commas) and compared as numbers, or else as text.
    """

    kind: Literal["dapo"] = "dapo"
    window: int = Field(300, ge=10)
    """Characters at the end of the text that are looked at."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        targets = [plain(str(target)) for target in accepted(prompt, self.kind)]
        lines = LINE.findall(sample.text[-self.window :])
        if not lines:
            return Score(value=-1.0, components={"accuracy": 0.0, "found": 0.0}, error="no line with 'Answer:'")
        answer = plain(lines[-1])
        right = any(_same(target, answer) for target in targets)
        return Score(value=1.0 if right else -1.0, components={"accuracy": float(right), "found": 1.0})


def plain(text: str) -> str:
    """An answer without what does not change it."""
    text = last_boxed(text) or text
    text = text.rpartition("=")[2].strip().rstrip(".").lower()
    while (inner := WRAPPED.sub(r"\1", text)) != text:
        text = inner
    text = NOISE.sub("", UNITS.sub("", text))
    text = SHORT_FRACTION.sub(lambda m: f"({m[1] or m[2]})/({m[3] or m[4]})", text)
    text = SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    return THOUSANDS.sub("", text).strip(".*:")


def _same(target: str, answer: str) -> bool:
    if target == answer:
        return bool(target)
    numbers = _number(target), _number(answer)
    return None not in numbers and numbers[0] == numbers[1]


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except DecimalException:
        fraction = re.fullmatch(r"(-?)\(?(-?\d{1,50})\)?/\(?(\d{1,50})\)?", text)
        if fraction is None or int(fraction[3]) == 0:
            return None
        number = Decimal(fraction[1] + "1") * Decimal(fraction[2]) / Decimal(fraction[3])
    return number if number.is_finite() else None
