"""Reward of DAPO for mathematical answers."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal, DecimalException
from typing import ClassVar, Literal

from plasmid import Prompt, Reward, Sample, Score
from pydantic import Field

from ..targets import read_targets
from .boxed_text import find_last_boxed
from .quantity import APART, WRAPPER, Quantity, read_quantity

LINE = re.compile(r"answer\s*:\s*([^\n]*)", re.IGNORECASE)
END_TOKEN = re.compile(r"(?:<\|[a-z_]{1,20}\|>|</s>)\s*$")
FORMULA = re.compile(r"[^$]*(?<!\\)\$([^$]+)(?<!\\)\$[^$]*")
MARKUP = re.compile(r"\*\*|\"|\\[()\[\]]|\\\\\s*$")
ARTICLE = re.compile(r"(?:an?|the) (?=[a-z]{2})", re.IGNORECASE)
WRAPPED = re.compile(rf"(?:{WRAPPER}|\\(?:overline|boxed|fbox))\{{([^{{}}]*)\}}")
SHORT_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}|(\w))(?:\{([^{}]+)\}|(\w))")
SHORT_ROOT = re.compile(r"\\sqrt ?(\w)")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
FRACTION = re.compile(r"(-?)(?:(\d{1,50})(?=\())?\(?(-?\d{1,50})\)?/\(?(\d{1,50})\)?")


class Dapo(Reward):
    """1.0 if the last ``Answer: ...`` line equals the target, else -1.0; also -1.0 if there is no such line.

    The reward of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476). Both sides are normalized (LaTeX wrappers,
    ``a = 3`` to ``3``, digit commas, units if only one side has one) and compared as numbers if possible, else as text.
    """

    kind: Literal["dapo"] = "dapo"
    reads_target: ClassVar[bool] = True
    window: int = Field(300, ge=10)
    """Number of characters to search, counted from the end of the text."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        targets = [read_answer(str(target)) for target in read_targets(prompt, self.kind)]
        lines = LINE.findall(sample.text[-self.window :])
        if not lines:
            return Score(value=-1.0, components={"accuracy": 0.0, "found": 0.0}, error="no line with 'Answer:'")
        answer = read_answer(lines[-1])
        right = any(_same(target, answer) for target in targets)
        return Score(value=1.0 if right else -1.0, components={"accuracy": float(right), "found": 1.0})


def read_answer(text: str) -> Quantity:
    """Split an answer into unit and expression, and drop markup that does not change the expression."""
    text = END_TOKEN.sub("", find_last_boxed(text) or text)
    if formula := FORMULA.fullmatch(text):  # text around a single formula is not part of the answer
        text = formula[1]
    text = MARKUP.sub("", text).rpartition("=")[2].strip().rstrip(".*:")
    quantity = read_quantity(ARTICLE.sub("", text))
    return replace(quantity, expression=_simplify(quantity.expression))


def _simplify(text: str) -> str:
    text = text.lower()
    while (inner := WRAPPED.sub(r"\1", text)) != text:
        text = inner
    text = re.sub(r"\\(?:left|right)(?![a-z])", "", text)
    text = SHORT_FRACTION.sub(lambda m: f"({m[1] or m[2]})/({m[3] or m[4]})", text)
    text = THOUSANDS.sub("", SHORT_ROOT.sub(r"\\sqrt{\1}", text)).strip(" .*:")
    return text if APART.search(text) else text.replace(" ", "")


def _same(target: Quantity, answer: Quantity) -> bool:
    if None not in (target.unit, answer.unit) and target.unit != answer.unit:
        return False
    if None not in (target.base, answer.base) and target.base != answer.base:
        return False
    if target.expression == answer.expression and (target.is_percent or not answer.is_percent):
        return bool(target.expression)
    numbers = _number(target.expression), _number(answer.expression)
    if numbers[0] is None or numbers[1] is None:
        return False
    if target.is_percent and not answer.is_percent and numbers[0] / 100 == numbers[1]:
        return True
    return numbers[0] == (numbers[1] / 100 if answer.is_percent and not target.is_percent else numbers[1])


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except DecimalException:
        fraction = FRACTION.fullmatch(text)
        if fraction is None or int(fraction[4]) == 0:
            return None
        number = Decimal(fraction[2] or 0) + Decimal(fraction[3]) / Decimal(fraction[4])
        number = -number if fraction[1] else number
    return number if number.is_finite() else None
